"""One training process: joins the others, builds what the experiment describes, trains, tells how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import torch

from rankzero import config, experiment_file
from rankzero import ranks as launcher
from rankzero.errors import UserError
from rankzero.events import DataDescribed, Emit
from rankzero.experiment import Experiment
from rankzero.launch import failures
from rankzero.launch.request import OUT_OF_MEMORY, JobRequest
from rankzero.launch.signals import unblocks_itself
from rankzero.run_store.folder import Identity
from rankzero.tracking.run_log import RunLog
from rankzero.training import lifecycle, precision, rng, strategies
from rankzero.training.checkpoints import restore
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.data import digest
from rankzero.training.data.loader import BatchLoader
from rankzero.training.data.order import check_same_lengths, make_batch_order
from rankzero.training.distributed import device
from rankzero.training.distributed.watchdog import Watchdog
from rankzero.training.distributed.world import World, join
from rankzero.training.job import State, TrainingContext
from rankzero.training.lifecycle import AttemptOutcome
from rankzero.training.loop import fit, frozen_heap
from rankzero.training.metrics.straggler import EventTimer
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.optimizers import as_values, options
from rankzero.training.sample_images.capture import ImageCapture
from rankzero.training.sample_images.user_images import class_names
from rankzero.training.stop import PRUNED, REASONS, TIME_LIMIT, Stop, end_with_launcher, listen

INTERRUPTED = 128 + signal.SIGINT


@unblocks_itself
def main(request: JobRequest) -> str:
    """Train; return the status of the attempt on this rank. The entry point of every worker."""
    ranks = launcher.detect()
    failures.forget(Path(request.failures), ranks.rank)
    stop = Stop()
    try:
        listen(stop)
        end_with_launcher(stop)
        with contextlib.ExitStack() as watched, join(ranks, device.choose(ranks)) as world:
            stop.training = True
            return attempt(request, world, stop, watched).status
    except BaseException as error:
        failures.write(failures.describe(error, ranks.rank), Path(request.failures))
        if isinstance(error, SystemExit):
            raise
        # The exception itself torchrun would write into logs/, secrets included; some versions take Ctrl-C for success.
        raise SystemExit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1) from None
    finally:
        stop.training = False


def attempt(
    request: JobRequest, world: World, stop: Stop, watched: contextlib.ExitStack
) -> AttemptOutcome:
    """Train once, tracked, among processes that have joined each other already. All ranks call it.

    A hang is watched for from now until `watched` is left.
    """
    settings = world.broadcast(
        request.config.encode()
    ).decode()  # rank 0's: another machine may have been told others
    experiment = config.from_yaml(experiment_file.load(request.experiment_file), settings)
    identity = Identity(
        **json.loads(world.broadcast(json.dumps(dataclasses.asdict(request.identity)).encode()))
    )
    gpus = device.gpu_uuids(world.ranks, experiment.train.strategy)
    log = RunLog.open(Path(request.runs), identity, world.ranks, gpus, offline=request.offline)
    tally = RunTotals()
    minutes, rank = experiment.train.limits.hang_minutes, world.ranks.rank
    watchdog = Watchdog(
        minutes,
        rank,
        lambda failed: failures.write(failed, log.folder.failures),
        lambda failed: world.report_failure(dataclasses.asdict(failed)),
    )
    watched.enter_context(watchdog.watching())
    world.extend_timeouts()
    with lifecycle.told(log, experiment, request.environment, world, tally) as told:
        job, state = build(experiment, world)
        device.forget_peak_memory(world)
        restore.newest(log.folder.checkpoints, job, state, log.notice, required=request.resumes)
        told.started(state.step, job.total_steps, _data(job, request))
        if OUT_OF_MEMORY in request.environment:
            log.notice(
                f"out of memory: {request.environment[OUT_OF_MEMORY]}; the batch stays {job.batch_order.batch_size}"
            )
        told.outcome = _train(job, state, log, stop, tally, watchdog)
    return told.outcome


def _data(job: TrainingContext, request: JobRequest) -> list[DataDescribed]:
    """Return what the run's data are, on rank 0."""
    if not job.world.ranks.first:
        return []
    file = request.environment.get("rankzero.experiment_file", request.experiment_file)
    return [
        digest.describe(job.train_loader.dataset, "training", file),
        digest.describe(job.val_loader.dataset, "validation", file),
    ]


def build(
    experiment: Experiment, world: World, data: tuple[Any, Any] | None = None
) -> tuple[TrainingContext, State]:
    """Make what the experiment describes, on this rank's device, replicated. All ranks call it.

    `data`: what the experiment's `data()` returned before, where that may be used again.
    """
    train = experiment.train
    if train.deterministic:
        rng.be_deterministic()
    device.set_threads(world.ranks)
    arithmetic = precision.set_up(train.precision, world.device)
    rng.seed_all(train.seed)
    train_set, val_set = data or load_data_sets(experiment)
    _agree_on_lengths(world, train_set, val_set)
    plan = make_batch_order(train, len(train_set), strategies.shards(train.strategy, world.size))
    model = experiment.model()  # on the host: a strategy moves what of it this rank needs
    feeds = [
        BatchLoader(
            dataset,
            world.device,
            seed=train.seed,
            workers=train.workers,
            collate=experiment.collate,
            local_world_size=world.ranks.local_world_size,
        )
        for dataset in (train_set, val_set)
    ]
    strategy = strategies.build(
        experiment, model, world, lambda: next(feeds[0].train_batches(plan, 0, 0, 1))
    )
    rng.seed_all(train.seed, 1 + strategy.shard.rank)
    total = train.steps or (train.epochs or 0) * plan.steps_per_epoch
    base_lrs = [float(group["lr"]) for group in strategy.optimizer.param_groups]
    state = State(
        strategy.model, strategy.optimizer, base_lrs, as_values(options(strategy.optimizer))
    )
    return TrainingContext(
        experiment,
        world,
        plan,
        total,
        arithmetic,
        strategy,
        feeds[0],
        feeds[1],
        EventTimer(world.device),
    ), state


def load_data_sets(experiment: Experiment) -> tuple[Any, Any]:
    """Return the experiment's data sets. Raises UserError where they are none."""
    data = experiment.data()
    try:
        train_set, val_set = data
        sizes = len(train_set), len(val_set)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"data() must return two map-style data sets (training, validation): {error}"
        ) from error
    if not all(sizes):
        raise UserError(
            "data() returned an empty data set: the training set has {} samples, the validation set {}".format(
                *sizes
            )
        )
    return train_set, val_set


def _agree_on_lengths(world: World, train_set: Any, val_set: Any) -> None:
    """Raise the same UserError on all ranks where any has other data: they would draw other batches, or wait for ever.

    A collective, for start-up only.
    """
    lengths = world.gather(torch.tensor([len(train_set), len(val_set)])).tolist()
    for what, column in zip(("training", "validation"), zip(*lengths, strict=True), strict=True):
        check_same_lengths(what, column)


def _train(
    job: TrainingContext,
    state: State,
    log: RunLog,
    stop: Stop,
    tally: RunTotals,
    watchdog: Watchdog,
) -> AttemptOutcome:
    train = job.experiment.train
    stop.limit(train.limits.max_minutes)
    checkpoints = _checkpoints(job, log)
    tally.best = state.best
    try:
        with frozen_heap(), watchdog.training():
            job = dataclasses.replace(
                job, beat=watchdog.beat, begin=watchdog.begin, image_capture=_gallery(job, log)
            )
            reason = fit(job, state, log, stop, checkpoints, tally)
    finally:
        if checkpoints is not None:
            _finish(checkpoints, log, tally)
        tally.best = state.best
    if reason is not None:
        # Without checkpoints nothing can go on: there, the end of the time is the end of the run.
        over = reason == REASONS[TIME_LIMIT] and train.checkpoints.save_every == 0
        pruned = log.folder.pruned
        why = (
            pruned.read_text(encoding="utf-8")
            if reason == REASONS[PRUNED] and pruned.exists()
            else ""
        )
        amid = ", amid its evaluation" if state.evaluation_pending else ""
        told = f"{reason} at step {state.step}{amid}" + (f": {why}" if why else "")
        return AttemptOutcome("FINISHED" if over else "KILLED", told)
    return AttemptOutcome("FINISHED", _success(job, state))


def _checkpoints(job: TrainingContext, log: RunLog) -> Checkpoints | None:
    """Return what keeps rank 0's checkpoints; None on other ranks."""
    experiment, world = job.experiment, job.world
    if not world.ranks.first:
        return None
    return Checkpoints(
        log.folder.path, experiment.train.checkpoints.keep, experiment.goal, world.size, log.notice
    )


def _gallery(job: TrainingContext, log: RunLog) -> ImageCapture:
    """Return what takes pictures; on other ranks than 0, what calls the experiment's own method."""
    experiment, world = job.experiment, job.world
    if not experiment.train.mlflow.log_pictures:
        return ImageCapture()
    whole = (
        experiment.train.strategy != "pp" or not world.is_distributed
    )  # a stage is no model to call
    own = (
        experiment.pictures
        if whole and type(experiment).pictures is not Experiment.pictures
        else None
    )
    return ImageCapture(
        log.folder.pictures if world.ranks.first else None,
        total=job.val_loader.samples,
        classes=class_names(job.val_loader.dataset) if world.ranks.first else (),
        own=own,
        notice=log.notice,
    )


def _finish(checkpoints: Checkpoints, emit: Emit, tally: RunTotals) -> None:
    for event in checkpoints.close():
        emit(event)
    tally.blocked_seconds = checkpoints.blocked_seconds


def _success(job: TrainingContext, state: State) -> str:
    goal = job.experiment.goal
    if state.best is None:
        return f"trained {state.step} steps"
    reached = (
        ""
        if goal.target is None
        else " (target reached)"
        if goal.reached(state.best)
        else " (target missed)"
    )
    return f"best {goal.metric} {state.best:.4g}{reached}"

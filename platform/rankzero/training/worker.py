"""One training process: joins the other ranks, builds what the experiment describes, and trains."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankzero import config, experiment_file
from rankzero import ranks as launcher
from rankzero.experiment import Experiment
from rankzero.launch import failures
from rankzero.launch.request import OUT_OF_MEMORY, JobRequest, keep_for_helper
from rankzero.launch.signals import unblocks_itself
from rankzero.ranks import Ranks
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.provenance import early_variables
from rankzero.scalars import shown
from rankzero.tracking.run_log import RunLog
from rankzero.training import final_test, improvement, lifecycle
from rankzero.training.build import build
from rankzero.training.checkpoints import restore
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.data import digest, sets, stream
from rankzero.training.distributed import device, peers
from rankzero.training.distributed.watchdog import Watchdog, is_busy, setup_seconds
from rankzero.training.distributed.world import World, join
from rankzero.training.job import State, TrainingContext
from rankzero.training.lifecycle import AttemptOutcome
from rankzero.training.loop import fit
from rankzero.training.metrics.mean_check import MeanCheck
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.sample_images.capture import ImageCapture
from rankzero.training.sample_images.user_images import class_names
from rankzero.training.stop import (
    EvaluationInterrupted,
    StopCode,
    StopRequest,
    end_with_launcher,
    handle_signals,
)

_INTERRUPTED = 128 + signal.SIGINT
# Seconds that a rank may take to exit after its work, before it ends itself.
_EXIT_SECONDS = 20.0


@unblocks_itself
def main(request: JobRequest) -> str:
    """Train. Return the status of the attempt on this rank. The entry point of every worker."""
    ranks = launcher.detect()
    failures.forget(Path(request.failures), ranks.rank)
    if not request.is_trial:  # whose command has not imported the file
        os.environ.update(early_variables(request.environment))
    stop = StopRequest()
    try:
        trial = RunFolder(Path(request.runs) / request.identity.name) if request.is_trial else None
        handle_signals(stop, trial.pruned if trial else None)
        end_with_launcher(stop)
        with contextlib.ExitStack() as watched, contextlib.ExitStack() as joined:
            with _start_watched(request, ranks):
                world = joined.enter_context(join(ranks, device.choose))
            stop.is_training = True
            status = attempt(request, world, stop, watched).status
        _exit_in_time(0)
        return status
    except BaseException as error:
        _exit_in_time(1)
        found = failures.describe(error, ranks.rank)
        failures.write(found, Path(request.failures), ranks.rank)
        if isinstance(error, SystemExit):
            raise
        # Do not let torchrun see the exception. It would write it into logs/ with all secrets, and
        # some versions take a KeyboardInterrupt for a success.
        raise SystemExit(_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1) from None
    finally:
        stop.is_training = False


def _start_watched(request: JobRequest, ranks: Ranks) -> contextlib.AbstractContextManager[None]:
    """End this rank if its GPU or the other ranks do not answer, as `attempt` does later."""
    # This command's own limit: rank 0's comes with the others.
    minutes = config.read_yaml(request.config).get("train.limits.hang_minutes")
    write = functools.partial(failures.write, folder=Path(request.failures))
    return Watchdog(minutes, ranks.rank, [write], setup_seconds=setup_seconds()).watching()


def _exit_in_time(code: int, seconds: float = _EXIT_SECONDS) -> None:
    """End this rank in `seconds`, also if the user's code left a thread that never ends."""
    # A process of the user's own, such as a notebook, goes on after a training.
    if multiprocessing.parent_process() is not None:
        timer = threading.Timer(seconds, os._exit, (code,))
        timer.name, timer.daemon = "exit", True
        timer.start()


def attempt(
    request: JobRequest, world: World, stop: StopRequest, watched: contextlib.ExitStack
) -> AttemptOutcome:
    """Train once, tracked, in processes that have joined each other. Collective.

    A watchdog runs until `watched` is closed: leaving the process group may hang too.
    """
    # Rank 0's settings and identity count. Another machine's command may have been given others.
    mine = [request.config, dataclasses.asdict(request.identity), request.resumes]
    settings, identity, resumes = world.share(mine)
    if world.ranks.node_rank > 0:  # the file may be elsewhere on this machine
        identity["experiment_file"] = request.identity.experiment_file
    experiment = config.from_yaml(experiment_file.load(request.experiment_file), settings)
    code = experiment_file.code_tags(request.experiment_file)
    gpus = device.gpu_uuids(world.ranks, experiment.train.strategy)
    log = RunLog.open(
        Path(request.runs), Identity(**identity), world.ranks, gpus, offline=request.offline
    )
    if world.ranks.local_rank == 0 and world.ranks.node_rank > 0 and not request.is_trial:
        keep_for_helper(log.folder, experiment, world.size)
    watchdog = Watchdog(
        experiment.train.limits.hang_minutes,
        world.ranks.rank,
        # This machine's command reads there: its run may have another name than rank 0's.
        [functools.partial(failures.write, folder=Path(request.failures)), world.report_failure],
        setup_seconds=setup_seconds(),
        local_processes=world.local_processes(),
        on_progress=_beat_writer(request, world, log.folder),
        is_gpu_busy=lambda: is_busy(world.device),
    )
    watched.enter_context(watchdog.watching())
    world.extend_timeouts()
    totals = RunTotals()
    with (
        lifecycle.tracked(log, experiment, request.environment, world, totals) as run,
        peers.watching(world, Path(request.failures), watchdog.may_be_ended),
    ):
        job, state = build(experiment, world)
        device.forget_peak_memory(world)
        restore.newest(log.folder.checkpoints, job, state, log.notice, required=resumes)
        test_sets = final_test.load_sets(experiment, world)
        validation = {sets.context(name): one.dataset for name, one in job.val_loaders.items()}
        used = {"training": job.train_loader.dataset, **validation, **test_sets}
        file = request.environment.get("rankzero.experiment_file", request.experiment_file)
        described = [digest.describe(one, use, file) for use, one in used.items()]
        run.start(state.step, job.total_steps, described, {**job.model_tags, **code})
        for text in (*_notices(request, job, state, used), *sets.differing(world, described, used)):
            log.notice(text)
        run.outcome = _train(job, state, log, stop, totals, watchdog, test_sets)
    return run.outcome


def _beat_writer(request: JobRequest, world: World, folder: RunFolder) -> Callable[[], None]:
    """Return what shows a search that its trial makes progress. Other runs write nothing."""

    def write() -> None:
        # Without a file, the journal is still a sign of life.
        with contextlib.suppress(OSError):
            folder.beat.write_text(str(time.time()))

    return write if request.is_trial and world.ranks.first else lambda: None


def _notices(
    request: JobRequest, job: TrainingContext, state: State, data: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what people should know of an attempt before its first step. `data`: sets by use."""
    if OUT_OF_MEMORY in request.environment:
        halved = request.environment[OUT_OF_MEMORY]
        yield f"out of memory: {halved}; the batch stays {job.batch_order.batch_size}"
    if left_out := job.left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        yield f"optimizer() leaves out {', '.join(left_out[:3])}{more}, so they are not trained"
    # A LightningModule's.
    if note := getattr(job.experiment, "_loader_note", ""):
        yield note
    early = improvement.early_end(job.experiment, state)
    if early and state.step < job.total_steps and not state.evaluation_pending:
        yield (
            f"nothing is left to train after step {state.step}, because {early}; to train "
            "further, change train.patience or train.limits.stop_at_target"
        )
    order = job.batch_order
    has_one_epoch = stream.is_stream(data["training"]) and order.samples < order.batch_size
    asks = job.frozen_parts.is_used or job.takes_progress or job.schedule_takes_progress
    if has_one_epoch and asks:
        yield (
            "the training set is a stream without a length, so every step is of epoch 0 for "
            "frozen() and at.epoch: give it a __len__, or count in steps"
        )
    ranks = job.strategy.shard.size
    for use, dataset in data.items():
        rest = stream.length_of(dataset) % ranks
        if job.experiment.lockstep and use != "training" and rest:
            yield (
                f"{rest} of {len(dataset)} samples of the {use} set are not "
                "evaluated, so that all ranks have equal batches (lockstep)"
            )


def _train(
    job: TrainingContext,
    state: State,
    log: RunLog,
    stop: StopRequest,
    totals: RunTotals,
    watchdog: Watchdog,
    test_sets: Mapping[str, Any],
) -> AttemptOutcome:
    train, checkpoints = job.experiment.train, None
    stop.limit_minutes(train.limits.max_minutes)
    if job.world.ranks.first:
        checkpoints = Checkpoints.of_run(
            log, train.checkpoints.keep, job.experiment.goal, job.world.size
        )
        watchdog.is_saving = checkpoints.is_writing
    job = dataclasses.replace(
        job,
        beat=watchdog.beat,
        suspended=watchdog.suspended_seconds,
        expect_slow_step=watchdog.expect_slow_step,
        image_capture=_image_capture(job, log),
        mean_check=_mean_check(job, log),
    )
    finished = False
    try:
        # The garbage collector walks all objects of PyTorch at times: tens of milliseconds.
        gc.freeze()
        with watchdog.training():
            stopped = fit(job, state, log, stop, checkpoints, totals)
            # Here, and not after rank 0 has written: another rank may be gone by then.
            (totals.peak_megabytes,) = job.world.highest(device.peak_memory_megabytes(job.world))
        # The time limit is an end that the user planned.
        finished = stopped in (StopCode.NONE, StopCode.TIME_LIMIT)
    finally:
        gc.unfreeze()
        totals.best = state.best
        if checkpoints is not None:
            for event in checkpoints.close(log.patience_seconds(finished=finished)):
                log(event)
            totals.blocked_seconds = checkpoints.blocked_seconds
    failure = checkpoints.failure if checkpoints else None
    # Only now, because the test loads other weights: the last checkpoint is on the disk.
    if finished and test_sets and job.world.all(failure is None):
        with watchdog.training():
            stopped = _test(job, state, test_sets, log, stop, totals) or stopped
    return _outcome(job, state, stopped, failure, log.folder)


def _test(
    job: TrainingContext,
    state: State,
    test_sets: Mapping[str, Any],
    log: RunLog,
    stop: StopRequest,
    totals: RunTotals,
) -> StopCode:
    """Evaluate the test sets. Return why that was interrupted, or NONE. Collective."""
    job.expect_slow_step()
    try:
        tested = final_test.evaluate_best(
            job, state, test_sets, log.folder.checkpoints, stop, log.notice
        )
    except EvaluationInterrupted as interrupted:
        return interrupted.code
    log(tested)
    totals.last_metrics |= tested.metrics
    return StopCode.NONE


def _outcome(
    job: TrainingContext,
    state: State,
    stopped: StopCode,
    missing_checkpoint: str | None,
    folder: RunFolder,
) -> AttemptOutcome:
    """Return how the attempt ended. `missing_checkpoint`: why the last one is not on the disk."""
    goal = job.experiment.goal
    lacks = f"; {missing_checkpoint}" if missing_checkpoint else ""
    if stopped and (lacks or stopped != StopCode.TIME_LIMIT):
        reason = f"{stopped.reason} at step {state.step}"
        if state.evaluation_pending:
            reason += ", during its evaluation"
        if stopped == StopCode.PRUNED and folder.pruned.exists():
            reason += f": {folder.pruned.read_text(encoding='utf-8')}"
        return AttemptOutcome("KILLED", reason + lacks)
    if lacks:
        # All steps are trained, but their result is not on the disk.
        return AttemptOutcome("FAILED", f"trained {state.step} steps{lacks}")
    reason = f"trained {state.step} steps"
    if state.best is None and state.evaluations_since_best:
        reason += f"; {goal.metric} was never a number"
    elif state.best is not None:
        reason = f"best {goal.metric} {shown(state.best)}"
        if goal.target is not None:
            reason += " (target reached)" if goal.reached(state.best) else " (target missed)"
    stalled = improvement.stalled(job.experiment, state)
    if stalled and state.step < job.total_steps:
        reason = f"{stalled}; {reason}"
    if stopped:
        reason = f"{stopped.reason} at step {state.step}; {reason}"
    return AttemptOutcome("FINISHED", reason)


def _mean_check(job: TrainingContext, log: RunLog) -> MeanCheck:
    train = job.experiment.train
    # With collectives, a rank on which the check fails would leave the others waiting.
    # torch.compile would compile the model for the halves of a batch.
    if job.strategy.lockstep or job.experiment.lockstep or train.compile:
        return MeanCheck()
    return MeanCheck(job.world.device, train.precision, log.notice)


def _image_capture(job: TrainingContext, log: RunLog) -> ImageCapture:
    """Return what captures images. On other ranks than 0 it only calls the experiment's method."""
    experiment, world = job.experiment, job.world
    if not experiment.train.mlflow.log_pictures or not job.val_loaders:
        return ImageCapture()
    # A pipeline's stage is not a model that `pictures` could call.
    has_whole_model = experiment.train.strategy != "pp" or not world.is_distributed
    # Pictures show the first validation set.
    shown = next(iter(job.val_loaders.values()))
    is_overridden = type(experiment).pictures is not Experiment.pictures
    return ImageCapture(
        log.folder.pictures if world.ranks.first else None,
        total=shown.samples,
        classes=class_names(shown.dataset) if world.ranks.first else (),
        own=experiment.pictures if has_whole_model and is_overridden else None,
        notice=log.notice,
    )

"""Evaluations: means over every sample of all ranks, and whether they are the best so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rankzero.errors import UserError
from rankzero.launch import failures
from rankzero.training import improvement, rng
from rankzero.training.data import sets
from rankzero.training.data.stream import Loader, StreamLoader
from rankzero.training.job import State, TrainingContext
from rankzero.training.metrics.evaluation_metrics import EvaluationMetrics
from rankzero.training.sample_images.capture import ImageCapture
from rankzero.training.stop import EvaluationInterrupted, StopPoll, StopRequest


class GoalMissing(UserError):
    """An evaluation has no metric of the goal's name. Every rank raises it."""


def evaluate_goal(
    job: TrainingContext, state: State, stop: StopRequest
) -> tuple[dict[str, float], bool]:
    """Evaluate, and add it to `state`. Return the metrics, and whether they are the best so far.

    Collective. The goal's metric decides. Without a validation set, only the replicas are compared.
    Raises EvaluationInterrupted, UserError if the replicas differ, and GoalMissing.
    """
    differing = job.world.ranks_that_differ(job.strategy.checksum())
    if differing:
        cause = (
            "something changes the model on one rank only, such as a write to a parameter outside "
            "the optimizer"
        )
        for name in job.frozen_parts.wrongly_set(state.model):
            cause = (
                f"{name!r}.requires_grad was set after model(), when DDP had wrapped the model; "
                "write frozen(self, epoch) instead"
            )
        raise UserError(
            f"the parameters of rank {', '.join(map(str, differing))} differ from rank 0's after "
            f"step {state.step}: {cause}"
        )
    # Ranks may differ in a later epoch only, for example if they draw from `random`.
    sets.check_same_batches(job.world, job.batch_order, state.step)
    if not job.val_loaders:
        return {}, False
    random_states, goal = rng.state(job.world.device), job.experiment.goal
    try:
        metrics = evaluate(job, state, stop, job.val_loaders, state.step)
        if goal.metric not in metrics:
            raise GoalMissing(
                f"the goal is {goal.metric!r}, but an evaluation has {sorted(metrics)}: set "
                "goal.metric, also in `rankzero resume RUN goal.metric=METRIC`"
            )
    except (EvaluationInterrupted, GoalMissing):
        # A repeated evaluation draws the same numbers.
        rng.restore(random_states, job.world.device)
        raise
    return metrics, improvement.add_evaluation(job.experiment, state, metrics[goal.metric])


def evaluate(
    job: TrainingContext,
    state: State,
    stop: StopRequest,
    loaders: Mapping[str, Loader],
    step: int,
) -> dict[str, float]:
    """Return ``<group>/<metric>``, means over every sample of all ranks. Collective.

    `loaders`: by group. `step`: of the weights. Raises EvaluationInterrupted.
    """
    # Running statistics differ by rank. The checkpoint stores rank 0's, so evaluate those.
    job.strategy.sync_buffers()
    poll, metrics = StopPoll(job.world, stop), dict[str, float]()
    with torch.no_grad(), state.weights_to_evaluate():
        # A module may change its weights in eval() and take that back in train(), as LoRA does.
        state.model.eval()
        try:
            for group, loader in loaders.items():
                values = _evaluate(job, state.model, group, loader, poll, step)
                metrics |= {f"{group}/{name}": value for name, value in values.items()}
        except RuntimeError as error:
            # Only batches of an evaluation differ in size.
            if failures.shows_lost_rank(error) and not job.experiment.lockstep:
                error.add_note("if measure() calls collectives, write lockstep = True")
            raise
        finally:
            state.model.train()
    return metrics


def _evaluate(
    job: TrainingContext,
    model: nn.Module,
    group: str,
    loader: Loader,
    poll: StopPoll,
    step: int,
) -> dict[str, float]:
    strategy = job.strategy
    totals = EvaluationMetrics(job.world, strategy.shard.size, job.experiment)
    micro_step = job.micro_batch_step(step, training=False)
    # Pictures show the first validation set.
    is_shown = group == next(iter(job.val_loaders), None)
    capture = job.image_capture if is_shown else ImageCapture()
    with capture.watching(model) as captured:
        for batch, samples in _batches(job, loader):
            poll.check()
            values = None
            if samples or strategy.lockstep:
                values = strategy.forward_metrics(micro_step, batch)
            job.beat()
            if values is not None:
                totals.add(values, samples)
                captured(batch, samples)
                job.mean_check.keep(batch, samples, values.values())
    job.mean_check.run(lambda part: strategy.forward_metrics(micro_step, part), model)
    return totals.reduce()


def _batches(job: TrainingContext, loader: Loader) -> Iterator[tuple[Any, int]]:
    """Yield this rank's batches of a data set and their sizes, equally many on every rank.

    A rank with fewer batches than another gets None for 0 samples, or its last batch again if a
    forward is a collective. Collective for a stream.
    """
    strategy, shard, lockstep = job.strategy, job.strategy.shard, job.experiment.lockstep
    batch_size = job.experiment.train.eval_batch or job.batch_order.micro_batch
    batches = loader.eval_batches(batch_size, shard.rank, shard.size, lockstep=lockstep)
    samples = loader.samples - (loader.samples % shard.size if lockstep else 0)
    most = max(1, math.ceil(samples / (batch_size * shard.size)))
    last, has_any = None, False
    for number in itertools.count():
        # `collate` may return None for samples, too.
        batch, size = next(batches, (None, 0))
        # No rank knows how many batches of a stream another one has.
        if isinstance(loader, StreamLoader):
            has_ended = job.world.all(not size)
        else:
            has_ended = not size and number >= most
        if has_ended:
            return
        if size:
            last, has_any = batch, True
        if not has_any and (strategy.lockstep or lockstep):
            mend = "lockstep = False" if lockstep else "train.strategy=ddp"
            count = f"{loader.samples} samples, fewer" if loader.samples else "fewer samples"
            raise UserError(
                f"a data set to evaluate has {count} than there are processes: use more samples, "
                f"or {mend}"
            )
        yield (last if strategy.lockstep else batch), size

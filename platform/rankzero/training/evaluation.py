"""Validation: means over every sample of all ranks, and whether they are the best so far."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from rankzero.errors import UserError
from rankzero.training import rng
from rankzero.training.job import State, TrainingContext
from rankzero.training.metrics.evaluation_metrics import EvaluationMetrics
from rankzero.training.stop import EvaluationInterrupted, StopPoll, StopRequest


def evaluate_goal(
    job: TrainingContext, state: State, stop: StopRequest
) -> tuple[dict[str, float], bool]:
    """Evaluate, and update `state.best`. Return the metrics, and whether they are the best so far.

    Collective. The goal's metric decides. Raises EvaluationInterrupted, and UserError if the
    replicas differ or the goal's metric is missing.
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
    metrics, goal = _evaluate(job, state, stop), job.experiment.goal
    if goal.metric not in metrics:
        raise UserError(
            f"the goal is {goal.metric!r}, but measure() returns {sorted(metrics)}: set goal.metric"
        )
    is_best = goal.better(metrics[goal.metric], state.best)
    if is_best:
        state.best = metrics[goal.metric]
    return metrics, is_best


def _evaluate(job: TrainingContext, state: State, stop: StopRequest) -> dict[str, float]:
    """Return ``val/<metric>`` means over every validation sample of all ranks. Collective.

    Raises EvaluationInterrupted.
    """
    strategy = job.strategy
    totals = EvaluationMetrics(job.world, strategy.shard.size, job.experiment)
    micro_step = job.micro_batch_step(state.step, training=False)
    # Running statistics differ by rank. The checkpoint stores rank 0's, so evaluate those.
    strategy.sync_buffers()
    random_states = rng.state(job.world.device)
    poll = StopPoll(job.world, stop)
    state.model.eval()
    try:
        with state.weights_to_evaluate(), torch.no_grad():
            with job.image_capture.watching(state.model) as captured:
                for batch, samples in _validation_batches(job):
                    poll.check()
                    values = None if batch is None else strategy.forward_metrics(micro_step, batch)
                    job.beat()
                    if values is not None:
                        totals.add(values, samples)
                        captured(batch, samples)
                        job.mean_check.keep(batch, samples)
            job.mean_check.run(lambda part: strategy.forward_metrics(micro_step, part))
    except EvaluationInterrupted:
        job.image_capture.forget()
        # The repeated evaluation must draw the same numbers.
        rng.restore(random_states, job.world.device)
        raise
    finally:
        state.model.train()
    return {f"val/{name}": value for name, value in totals.reduce().items()}


def _validation_batches(job: TrainingContext) -> Iterator[tuple[Any, int]]:
    """Yield this rank's validation batches and their sizes, equally many on every rank.

    A rank with fewer batches than another gets None for 0 samples, or its last batch again.
    """
    shard = job.strategy.shard
    batch_size = job.experiment.train.eval_batch or job.batch_order.micro_batch
    batch, count = None, 0
    for batch, samples in job.val_loader.eval_batches(batch_size, shard.rank, shard.size):
        count += 1
        yield batch, samples
    if job.strategy.lockstep and batch is None:
        raise UserError(
            "the validation set has fewer samples than there are processes: "
            "use more samples, or train.strategy=ddp"
        )
    # If a forward is a collective, a rank must run one for each of the other ranks' batches.
    most = math.ceil(job.val_loader.samples / (batch_size * shard.size))
    for _ in range(count, most):
        yield (batch if job.strategy.lockstep else None), 0

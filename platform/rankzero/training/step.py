"""One optimizer step: gradients are added up over micro-batches, clipped and used.

With ``turns = ("discriminator", "generator")``, each optimizer steps on a loss of its own, as in a
GAN. In each turn, `measure` gets `at.turn` and the same samples. All gradients are added up, those
of the other optimizers are dropped, and one optimizer steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rankzero.training.job import State, TrainingContext
from rankzero.training.metrics.straggler import TimedBatches
from rankzero.training.metrics.window import check_names
from rankzero.training.optimization.joint_optimizer import JointOptimizer
from rankzero.training.optimization.optimizers import set_lr
from rankzero.training.strategies.base import divide_gradients


def train_step(job: TrainingContext, state: State, batches: Iterator[Any]) -> dict[str, Tensor]:
    """Take one optimizer step, and return its metrics. Collective.

    The metrics are means over this rank's samples of the step, still on the device. A
    `Ratio` has the means of both parts. A turn's metrics have its name in front, as in
    ``generator/loss``.
    """
    optimizer = state.optimizer
    # A method for this would cost each step a call.
    at = (job.progress(state.step, training=True),) if job.schedule_takes_progress else ()
    factors = job.experiment.schedule(state.step, job.total_steps, *at)
    set_lr(optimizer, state.base_lrs, factors)
    if job.experiment.turns:
        assert isinstance(optimizer, JointOptimizer)
        metrics = _take_turns(job, state.step, optimizer, batches)
    else:
        metrics = _accumulate(job, state.step, None, batches)
        metrics |= _use_gradients(job, optimizer)
    if job.precision.scaler is not None:
        # It adapts its scale to the steps with an overflow.
        job.precision.scaler.update()
    if state.average is not None:
        state.average.update(state.step + 1)
    return metrics


def timed_steps(
    job: TrainingContext, state: State, batches: Iterator[Any], count: int
) -> tuple[float, float]:
    """Take steps, and return their seconds and the seconds that they waited for data."""
    timed, start = TimedBatches(batches, job.world.device), job.world.now()
    for _ in range(count):
        train_step(job, state, timed)
    return job.world.now() - start, timed.read()


def _take_turns(
    job: TrainingContext, step: int, optimizer: JointOptimizer, batches: Iterator[Any]
) -> dict[str, Tensor]:
    weights = job.batch_order.weights(step, job.strategy.shard.rank)
    micro_batches = [next(batches) for _ in weights]
    found: dict[str, Tensor] = {}
    scaler, scaled = job.precision.scaler, set[str]()
    for turn in job.experiment.turns:
        if scaler is not None and turn in scaled:
            # It lets an optimizer step once between two updates.
            scaler.update()
            scaled.clear()
        mine = optimizer.parts[turn]
        # `frozen` may hold all of its parameters, and then its loss may have no gradient.
        is_trained = any(p.requires_grad for group in mine.param_groups for p in group["params"])
        metrics = _accumulate(job, step, turn, iter(micro_batches), is_trained=is_trained)
        for name, part in optimizer.parts.items():
            if name != turn:
                part.zero_grad(set_to_none=True)
        job.strategy.average_gradients(mine)
        scaled |= {turn} if _has_gradients(mine) else set()
        metrics |= _use_gradients(job, mine)
        found |= {f"{turn}/{name}": value for name, value in metrics.items()}
    return found


def _accumulate(
    job: TrainingContext,
    step: int,
    turn: str | None,
    batches: Iterator[Any],
    *,
    is_trained: bool = True,
) -> dict[str, Tensor]:
    """Add up the gradients of a step or a turn. Return as `train_step`. Collective.

    `is_trained`: whether there are gradients, the same on every rank.
    """
    strategy = job.strategy
    weights = job.batch_order.weights(step, strategy.shard.rank)
    how = job.micro_batch_step(step, training=True, turn=turn, accumulation=len(weights))
    if not is_trained:
        how = dataclasses.replace(how, has_backward=False)
    metrics: dict[str, Tensor] = {}
    for index, weight in enumerate(weights):
        batch = next(batches)
        job.beat()
        job.image_capture.see_training_batch(batch)
        # Ranks average their gradients once a step, during the last backward.
        is_last = index == how.accumulation - 1
        if weight != how.weight:
            how = dataclasses.replace(how, weight=weight)
        with contextlib.nullcontext() if is_last else strategy.no_sync():
            values = strategy.forward_backward(how, batch)
        if how.accumulation > 1:
            # Else a missing value would count as 0.
            if index:
                check_names(values.keys(), metrics.keys())
            values = {
                name: v / how.accumulation + metrics.get(name, 0.0) for name, v in values.items()
            }
        metrics = values
    if metrics["loss"].dim() and is_trained:
        # A Ratio: only now is its whole denominator known.
        divide_gradients(strategy.model, metrics["loss"], how.samples, job.world)
    return metrics


def _use_gradients(job: TrainingContext, optimizer: Optimizer) -> dict[str, Tensor]:
    """Clip the gradients, let `optimizer` step, and clear them. Return the norm if it is logged."""
    train, scaler = job.experiment.train, job.precision.scaler
    found: dict[str, Tensor] = {}
    if train.clip is not None or train.log_gradient_norm:
        # The norm is bounded in true units, so the loss scale must go first.
        if scaler is not None and _has_gradients(optimizer):
            scaler.unscale_(optimizer)
        norm = job.strategy.clip(train.clip or math.inf)
        if train.log_gradient_norm:
            found["gradient_norm"] = norm
    if scaler is None:
        optimizer.step()
    elif _has_gradients(optimizer):
        # The scaler skips the step if a gradient overflowed.
        scaler.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    return found


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])

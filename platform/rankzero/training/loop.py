"""THE loop.

Between two reports it does not call `.item()`, wait for the device, or exchange anything but
gradients.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rankzero.errors import NotFinite
from rankzero.events import Event
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.job import State, TrainingContext
from rankzero.training.metrics.reporter import Reporter
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.optimizers import set_lr
from rankzero.training.periodic import PeriodicActions
from rankzero.training.stop import StopCode, StopRequest
from rankzero.training.strategies.base import divide_gradients


def fit(
    job: TrainingContext,
    state: State,
    emit: Callable[[Event], None],
    stop: StopRequest,
    checkpoints: Checkpoints | None,
    totals: RunTotals,
) -> StopCode:
    """Train from `state.step` to the end. Return why it stopped early, or NONE. Collective.

    Only rank 0 passes `checkpoints`. On other ranks `emit` does nothing.
    """
    actions = PeriodicActions(job, state, emit, stop, checkpoints, totals)
    reporter = Reporter(job, state, totals)
    batches = job.train_loader.train_batches(
        job.batch_order, job.strategy.shard.rank, state.step, job.total_steps
    )
    state.model.train()
    stopped = StopCode.NONE
    if state.evaluation_pending:
        stopped = actions.repeat_interrupted_evaluation()
    else:
        actions.begin_epoch()
    reporter.start_window()
    while not stopped and state.step < actions.last_step:
        metrics, data_wait = train_step(job, state, batches)
        state.step += 1
        reporter.add(metrics, data_wait)
        if not (reporter.is_full or actions.are_due):
            continue
        # One collective and one wait for the device. All ranks learn the same values, and whether
        # any of them wants to stop.
        window, events = reporter.report(stop.code, actions_due=actions.are_due)
        for event in events:
            emit(event)
        if not window.is_finite:
            raise NotFinite(
                f"train/loss is not finite at step {state.step}: "
                "lower lr, set train.clip, or use bf16"
            )
        # Evaluation first, then the checkpoint, which carries the evaluation's metrics.
        stopped = actions.run(window.stop_code)
        reporter.start_window()
    return stopped


def train_step(
    job: TrainingContext, state: State, batches: Iterator[Any]
) -> tuple[dict[str, Tensor], float]:
    """Take one optimizer step. Return its metrics, and the seconds of waiting for data. Collective.

    The metrics are means over this rank's samples of the step, still on the device. Of a `Ratio`,
    both parts are.
    """
    optimizer, strategy, scaler = state.optimizer, job.strategy, job.precision.scaler
    set_lr(optimizer, state.base_lrs, job.experiment.schedule(state.step, job.total_steps))
    how = job.micro_batch_step(state.step, training=True)
    metrics: dict[str, Tensor] = {}
    data_wait = 0.0
    for index in range(how.accumulation):
        begun = time.perf_counter()
        batch = next(batches)
        data_wait += time.perf_counter() - begun
        job.beat()
        job.image_capture.see_training_batch(batch)
        # Ranks average their gradients once a step, during the last backward.
        is_last = index == how.accumulation - 1
        with contextlib.nullcontext() if is_last else strategy.no_sync():
            values = strategy.forward_backward(how, batch)
        if how.accumulation > 1:
            values = {
                name: v / how.accumulation + metrics.get(name, 0.0) for name, v in values.items()
            }
        metrics = values
    if metrics["loss"].dim():
        # A Ratio: only now is its whole denominator known.
        divide_gradients(strategy.model, metrics["loss"], how.samples, job.world)
    norm = apply_gradients(job, optimizer)
    if norm is not None:
        metrics["gradient_norm"] = norm
    if scaler is not None:
        # It adapts its scale to the steps with an overflow.
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if state.average is not None:
        state.average.update(state.step + 1)
    return metrics, data_wait


def apply_gradients(job: TrainingContext, optimizer: Optimizer) -> Tensor | None:
    """Clip the gradients, and let `optimizer` step. Return their norm if it is logged."""
    train, scaler, norm = job.experiment.train, job.precision.scaler, None
    if train.clip is not None or train.log_gradient_norm:
        # The norm is bounded in true units, so the loss scale must go first.
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = job.strategy.clip(train.clip or math.inf)
    if scaler is None:
        optimizer.step()
    else:
        # The scaler skips the step if a gradient overflowed.
        scaler.step(optimizer)
    return norm if train.log_gradient_norm else None

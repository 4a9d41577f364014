"""THE loop.

    while step < total:
        micro-batches: forward under autocast, backward; gradients meet on the last one
        clip, step, zero
        window full?  ONE fused reduction: metrics, stop, times of every rank    -> StepsLogged
            about a second's steps: who wants to stop waits no longer, whatever train.log_every
        a milestone?  evaluation, checkpoint, leaving: see `milestones`

Nothing else happens between two steps: no `.item()`, no host sync, no other collective.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rankzero.errors import NotFinite
from rankzero.events import Emit, StepsLogged
from rankzero.metric_names import DATA_WAIT, SPEED, STEP_SECONDS
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.job import State, TrainingContext, arithmetic
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.metrics.window import MetricWindow, WindowStats
from rankzero.training.periodic import PeriodicActions
from rankzero.training.stop import LONGEST_WINDOW, Stop, next_length


def fit(
    job: TrainingContext,
    state: State,
    emit: Emit,
    stop: Stop,
    checkpoints: Checkpoints | None,
    tally: RunTotals,
) -> str | None:
    """Train from `state.step` to the end; return why it stopped early, None when it did not.

    Every rank calls it. `checkpoints` is rank 0's; `emit` does nothing on other ranks.
    """
    train, plan = job.experiment.train, job.batch_order
    milestones = PeriodicActions(job, state, emit, stop, checkpoints, tally)
    batches = job.train_loader.train_batches(
        plan, job.strategy.shard.rank, state.step, job.total_steps
    )
    window, length = MetricWindow(job.world), 1
    whole: WindowStats | None = None  # of the steps since the last whose speed was told
    state.model.train()
    reason = evaluate_first(job, state, milestones) if state.evaluation_pending else None
    times: list[float] = []
    waited, start = 0.0, job.world.now()
    while reason is None and state.step < milestones.total:
        metrics, wait = train_step(job, state, batches)
        window.add(metrics)
        state.step += 1
        waited += wait
        times.append(time.time())
        if len(window) < length and not milestones.due:
            continue
        report = window.reduce(stop.code, job.world.now() - start, waited, job.forward_timer.read())
        whole = report if whole is None else whole.and_then(report)
        emit(values_logged(state, report, times))
        left = (train.log_every or 0) - whole.steps
        if left <= 0 or milestones.due or report.stop_code or not report.finite:
            tally.add(whole, plan.batch_size)
            emit(speed_logged(job, state, whole, times[-1]))
            whole, left = None, train.log_every or LONGEST_WINDOW
        length = next_length(length, report.step_seconds, left)
        if not report.finite:
            raise NotFinite(
                f"train/loss is not finite at step {state.step}: lower lr, set train.clip, or use bf16"
            )
        reason = milestones.reach(report.stop_code)
        times, waited, start = [], 0.0, job.world.now()
    return reason


def evaluate_first(job: TrainingContext, state: State, milestones: PeriodicActions) -> str | None:
    """Do what a stop had left, as it would have been done after the step before; return why to leave, None to go on."""
    set_lr(
        state, job.experiment.schedule(state.step - 1, job.total_steps)
    )  # who overrides it may count steps there
    reason = milestones.reach()
    if (
        "torch._dynamo" in sys.modules
    ):  # where anything is compiled, by train.compile or by the experiment itself
        torch.compiler.reset()  # it has seen evaluation's batches first: a step for any batch's size has other bits
    job.begin()
    return reason


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the garbage collector off what exists now: walking all of PyTorch takes tens of milliseconds."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def train_step(
    job: TrainingContext, state: State, batches: Iterator[Any]
) -> tuple[dict[str, Tensor], float]:
    """Take one optimizer step; return its metrics, still on the device, and the seconds waited for data."""
    set_lr(state, job.experiment.schedule(state.step, job.total_steps))
    accumulation, how, strategy = job.batch_order.accumulation, arithmetic(job), job.strategy
    metrics: dict[str, Tensor] = {}
    waited = 0.0
    for index in range(accumulation):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        job.beat()
        job.image_capture.see_training_batch(batch)
        if index < accumulation - 1:
            with strategy.no_sync():
                values = strategy.forward_backward(how, batch)
        else:
            values = strategy.forward_backward(how, batch)
        metrics = values if accumulation == 1 else _accumulate(metrics, values, accumulation)
    update(job, state)
    return metrics, waited


def update(job: TrainingContext, state: State) -> None:
    """Clip, step, zero."""
    scaler, clip = job.precision.scaler, job.experiment.train.clip
    if clip is not None:
        if scaler is not None:
            scaler.unscale_(state.optimizer)
        job.strategy.clip(clip)
    if scaler is None:
        state.optimizer.step()
    else:
        scaler.step(state.optimizer)
        scaler.update()
    state.optimizer.zero_grad(set_to_none=True)


def set_lr(state: State, factor: float) -> None:
    """Set every group's learning rate to its base times `factor`."""
    for group, base in zip(state.optimizer.param_groups, state.base_lrs, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(base * factor)
        else:
            group["lr"] = base * factor


def values_logged(state: State, report: WindowStats, times: list[float]) -> StepsLogged:
    """Return each step's values."""
    steps = range(state.step - report.steps + 1, state.step + 1)
    return StepsLogged(
        list(steps), times, {f"train/{name}": column for name, column in report.values.items()}
    )


def speed_logged(
    job: TrainingContext, state: State, report: WindowStats, moment: float
) -> StepsLogged:
    """Return the speed of a report's steps."""
    speed = {
        "lr": [float(state.optimizer.param_groups[0]["lr"])],
        SPEED: [job.batch_order.batch_size / report.step_seconds],
        STEP_SECONDS: [report.step_seconds],
        DATA_WAIT: [report.data_wait_seconds / report.seconds],
    }
    return StepsLogged([state.step], [moment], speed)


def _accumulate(
    sums: dict[str, Tensor], values: dict[str, Tensor], accumulation: int
) -> dict[str, Tensor]:
    return {name: value / accumulation + sums.get(name, 0.0) for name, value in values.items()}

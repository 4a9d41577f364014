"""THE loop.

    while step < total:
        micro-batches: forward under autocast, backward; gradients meet on the last one
        clip, step, zero
        window full?  ONE fused reduction: metrics, stop, times of every rank    -> StepsLogged
            about a second's steps: who wants to stop waits no longer, whatever train.log_every
        evaluation due?  means over every sample, replicas compared              -> Evaluated
        checkpoint due?  copy to host; a thread writes                           -> CheckpointSaved
        stop asked for?  checkpoint, leave

Nothing else happens between two steps: no `.item()`, no host sync, no other collective. The order
of evaluation before checkpoint matters: a checkpoint carries its step's validation metrics.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from rankzero.events import Evaluated, Hook, StepsLogged
from rankzero.tracking.facts import DATA_WAIT, SPEED, STEP_SECONDS
from rankzero.train import randomness, strategies
from rankzero.train.checkpoint import Checkpoints
from rankzero.train.evaluation import evaluation, show
from rankzero.train.job import Job, State, arithmetic
from rankzero.train.meters import Report, Tally, Window
from rankzero.train.stop import REASONS, Stop

REPORT_SECONDS = 1.0
LONGEST_WINDOW = 1000  # steps: bounds what a SIGKILL can take, and the host's list of tensors


class NotFinite(Exception):
    """The training diverged."""


def fit(job: Job, state: State, emit: Hook, stop: Stop, checkpoints: Checkpoints | None, tally: Tally) -> str | None:
    """Train from `state.step` to the end; return why it stopped early, None when it did not.

    Every rank calls it. `checkpoints` is rank 0's; `emit` does nothing on other ranks.
    """
    train, plan, total = job.experiment.train, job.plan, job.total_steps
    evaluate_every = train.eval_every or plan.steps_per_epoch
    save_every = train.save_every if train.save_every is not None else evaluate_every
    batches = job.gallery.training(job.train_feed.train(plan, job.strategy.shard.rank, state.step, total))
    window, length = Window(job.world), 1
    whole: Report | None = None  # of the steps since the last whose speed was told
    state.model.train()
    times: list[float] = []
    waited, better, start = 0.0, False, job.world.now()
    while state.step < total:
        metrics, wait = train_step(job, state, batches)
        window.add(metrics)
        state.step += 1
        waited += wait
        times.append(time.time())
        evaluation_due = state.step % evaluate_every == 0 or state.step == total
        save_due = save_every > 0 and (state.step % save_every == 0 or state.step == total)
        if len(window) < length and not evaluation_due and not save_due:
            continue
        report = window.reduce(stop.code, job.world.now() - start, waited, job.stopwatch.read())
        whole = report if whole is None else whole.and_then(report)
        emit(values_logged(state, report, times))
        left = (train.log_every or 0) - whole.steps
        if left <= 0 or evaluation_due or save_due or report.stop_code or not report.finite:
            tally.add(whole, plan.batch_size)
            emit(speed_logged(job, state, whole, times[-1]))
            whole, left = None, train.log_every or LONGEST_WINDOW
        length = next_length(length, report.step_seconds, left)
        if not report.finite:
            raise NotFinite(f"train/loss is not finite at step {state.step}: lower lr, set train.clip, or use bf16")
        if evaluation_due:
            tally.last_metrics, better = evaluation(job, state, report)
            emit(Evaluated(time.time(), state.step, tally.last_metrics, better))
        if evaluation_due and train.stop_at_target and job.experiment.goal.reached(state.best):
            total = state.step  # every rank has the same best, so every rank finishes here
        if evaluation_due:
            show(job, state, better=better, last=state.step == total, seconds=tally.train_seconds, emit=emit)
        if save_every and (save_due or report.stop_code or total == state.step):
            fresh = evaluation_due and bool(tally.last_metrics)
            save(job, state, checkpoints, emit, tally.last_metrics if fresh else {}, fresh and better)
        for event in checkpoints.poll() if checkpoints else ():
            emit(event)
        if report.stop_code and state.step < total:
            return REASONS[report.stop_code]
        times, waited, start = [], 0.0, job.world.now()
    return None


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Keep the garbage collector off what exists now: walking all of PyTorch takes tens of milliseconds."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def train_step(job: Job, state: State, batches: Iterator[Any]) -> tuple[dict[str, Tensor], float]:
    """Take one optimizer step; return its metrics, still on the device, and the seconds waited for data."""
    set_lr(state, job.experiment.schedule(state.step, job.total_steps))
    accumulation, how, strategy = job.plan.accumulation, arithmetic(job), job.strategy
    metrics: dict[str, Tensor] = {}
    waited = 0.0
    for index in range(accumulation):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        job.beat()
        if index < accumulation - 1:
            with strategy.accumulating():
                values = strategy.gradients(how, batch)
        else:
            values = strategy.gradients(how, batch)
        metrics = values if accumulation == 1 else _accumulate(metrics, values, accumulation)
    update(job, state)
    return metrics, waited


def update(job: Job, state: State) -> None:
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


def save(
    job: Job, state: State, checkpoints: Checkpoints | None, emit: Hook, metrics: Mapping[str, float], best: bool
) -> None:
    """Have a checkpoint written. A collective: every rank hands over its random state, and its part of the model."""
    whole = state_dict(job, state)
    if checkpoints is not None:
        for event in checkpoints.save(whole, state.step, metrics, best):
            emit(event)
        begun = time.perf_counter()
        job.world.now()  # a GPU copies to the host by itself; the loop waits for that next
        checkpoints.blocked_seconds += time.perf_counter() - begun


def state_dict(job: Job, state: State) -> dict[str, Any]:
    """Return all that resuming needs, on rank 0. A collective."""
    scaler, randoms = job.precision.scaler, job.world.gather(randomness.state(job.world.device))
    return {
        **job.strategy.state(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "randoms": randoms,
        "layout": strategies.layout(job.experiment.train.strategy, job.world.size),
        "options": state.options,
        "step": state.step,
        "best": state.best,
        "batch_size": job.plan.batch_size,
        "seed": job.plan.seed,
        "samples": job.plan.samples,
    }


def next_length(length: int, step_seconds: float, most: int = LONGEST_WINDOW) -> int:
    """Return the next window's steps: about a second's worth, at most twice the last. The same on every rank."""
    fitting = int(REPORT_SECONDS / max(step_seconds, 1e-9))
    return max(1, min(2 * length, fitting, most, LONGEST_WINDOW))


def values_logged(state: State, report: Report, times: list[float]) -> StepsLogged:
    """Return each step's values."""
    steps = range(state.step - report.steps + 1, state.step + 1)
    return StepsLogged(list(steps), times, {f"train/{name}": column for name, column in report.values.items()})


def speed_logged(job: Job, state: State, report: Report, moment: float) -> StepsLogged:
    """Return the speed of a report's steps."""
    speed = {
        "lr": [float(state.optimizer.param_groups[0]["lr"])],
        SPEED: [job.plan.batch_size / report.step_seconds],
        STEP_SECONDS: [report.step_seconds],
        DATA_WAIT: [report.data_wait_seconds / report.seconds],
    }
    return StepsLogged([state.step], [moment], speed)


def _accumulate(sums: dict[str, Tensor], values: dict[str, Tensor], accumulation: int) -> dict[str, Tensor]:
    return {name: value / accumulation + sums.get(name, 0.0) for name, value in values.items()}

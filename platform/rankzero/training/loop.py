"""THE loop.

Between two reports it does not call `.item()`, wait for the device, or exchange anything but
gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rankzero.events import Event, Noticed
from rankzero.training.checkpoints import carried_state
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.job import State, TrainingContext
from rankzero.training.metrics.divergence import Divergence
from rankzero.training.metrics.reporter import Reporter
from rankzero.training.metrics.straggler import TimedBatches
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.periodic import PeriodicActions
from rankzero.training.step import train_step
from rankzero.training.stop import StopCode, StopRequest


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

    def notice(text: str) -> None:
        emit(Noticed(time.time(), text))

    actions = PeriodicActions(job, state, emit, stop, checkpoints, totals)
    divergence = Divergence(job, state, notice)
    batches = job.train_loader.train_batches(
        job.batch_order, job.strategy.shard.rank, state.step, job.total_steps
    )
    job.work_meter.train_only(job.frozen_parts.now)
    counted = job.work_meter.watch(batches, notice)
    timed = TimedBatches(carried_state.watch(counted, job, state, notice), job.world.device)
    reporter = Reporter(job, state, totals, timed.read)
    state.model.train()
    stopped = StopCode.NONE
    if state.evaluation_pending:
        stopped = actions.repeat_interrupted_evaluation()
    elif state.step < actions.last_step:
        actions.begin_epoch()
    reporter.start_window()
    while not stopped and state.step < actions.last_step:
        metrics = train_step(job, state, timed)
        state.step += 1
        reporter.add(metrics)
        if not (reporter.is_full or actions.are_due):
            continue
        # All ranks learn the same values, and whether any of them wants to stop.
        window, events = reporter.report(stop.code, actions_due=actions.are_due)
        for event in events:
            emit(event)
        divergence.check(window)
        # Evaluation first, then the checkpoint, which carries the evaluation's metrics.
        stopped = actions.run(window.stop_code)
        reporter.start_window()
    return stopped

"""What happens between two windows of steps.

    evaluation due?  means over every sample, replicas compared              -> Evaluated
    checkpoint due?  copy to host; a thread writes                           -> CheckpointSaved
    stop asked for?  checkpoint, leave

Evaluation comes before checkpoint: a checkpoint carries its step's validation metrics. A stop leaves a long evaluation
between two batches; the checkpoint then owes it, and who goes on makes it anew before the next step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rankzero.events import Emit, Evaluated
from rankzero.training import rng, strategies
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.evaluation import evaluation, show
from rankzero.training.job import State, TrainingContext
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.stop import REASONS, EvaluationInterrupted, Stop


class PeriodicActions:
    """The evaluations and checkpoints of one training. Every rank asks the same, at the same steps.

    `checkpoints` is rank 0's; `emit` does nothing on other ranks.
    """

    def __init__(
        self,
        job: TrainingContext,
        state: State,
        emit: Emit,
        stop: Stop,
        checkpoints: Checkpoints | None,
        tally: RunTotals,
    ) -> None:
        train = job.experiment.train
        self._job, self._state, self._emit, self._stop = job, state, emit, stop
        self._checkpoints, self._tally = checkpoints, tally
        self._evaluate_every = train.eval_every or job.batch_order.steps_per_epoch
        self._save_every = (
            train.checkpoints.save_every
            if train.checkpoints.save_every is not None
            else self._evaluate_every
        )
        self.total = job.total_steps
        """The training's last step."""

    @property
    def due(self) -> bool:
        """Whether this step is to be evaluated or saved."""
        return self._is_due(self._evaluate_every) or self._is_due(self._save_every)

    def _is_due(self, every: int) -> bool:
        step = self._state.step
        return every > 0 and (step % every == 0 or step == self.total)

    def reach(self, stop_code: int = 0) -> str | None:
        """Do what is due at this step; return why to leave the training after it, None to go on. A collective.

        `stop_code`: what the ranks have agreed on, 0 for going on.
        """
        state, better = self._state, False
        metrics: dict[str, float] = {}
        save_due = (
            self._is_due(self._save_every) or state.evaluation_pending
        )  # the checkpoint there is owes it
        if state.evaluation_pending or self._is_due(self._evaluate_every):
            try:
                metrics, better = self._evaluate()
            except EvaluationInterrupted as left:
                state.evaluation_pending, stop_code = True, left.code
        if self._save_every and (save_due or stop_code or state.step == self.total):
            save(self._job, state, self._checkpoints, self._emit, metrics, better)
        for event in self._checkpoints.poll() if self._checkpoints else ():
            self._emit(event)
        return (
            REASONS[stop_code]
            if stop_code and (state.evaluation_pending or state.step < self.total)
            else None
        )

    def _evaluate(self) -> tuple[dict[str, float], bool]:
        """Evaluate, tell, show; return the metrics, and whether they are the best. Raises Left."""
        job, state, tally = self._job, self._state, self._tally
        metrics, better = evaluation(job, state, self._stop)
        state.evaluation_pending, tally.last_metrics = False, metrics
        self._emit(Evaluated(time.time(), state.step, metrics, better))
        if job.experiment.train.limits.stop_at_target and job.experiment.goal.reached(state.best):
            self.total = state.step  # every rank has the same best, so every rank finishes here
        show(
            job,
            state,
            better=better,
            last=state.step == self.total,
            seconds=tally.train_seconds,
            emit=self._emit,
        )
        return metrics, better


def save(
    job: TrainingContext,
    state: State,
    checkpoints: Checkpoints | None,
    emit: Emit,
    metrics: Mapping[str, float],
    best: bool,
) -> None:
    """Have a checkpoint written. A collective: every rank hands over its random state, and its part of the model."""
    whole = state_dict(job, state)
    if checkpoints is not None:
        for event in checkpoints.save(whole, state.step, metrics, best):
            emit(event)
        begun = time.perf_counter()
        job.world.now()  # a GPU copies to the host by itself; the loop waits for that next
        checkpoints.blocked_seconds += time.perf_counter() - begun


def state_dict(job: TrainingContext, state: State) -> dict[str, Any]:
    """Return all that resuming needs, on rank 0. A collective."""
    scaler, randoms = job.precision.scaler, job.world.gather(rng.state(job.world.device))
    return {
        **job.strategy.state(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "randoms": randoms,
        "layout": strategies.layout(job.experiment.train.strategy, job.world.size),
        "options": state.options,
        "step": state.step,
        "best": state.best,
        "owed": state.evaluation_pending,
        "batch_size": job.batch_order.batch_size,
        "seed": job.batch_order.seed,
        "samples": job.batch_order.samples,
    }

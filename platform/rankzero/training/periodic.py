"""Evaluations, checkpoints and early stops: what happens between two windows of steps.

The evaluation comes before the checkpoint, which carries its metrics. A stop interrupts a long
evaluation between two batches. The checkpoint then marks it as pending, and the next attempt
repeats it before its first step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rankzero.events import Evaluated, Event, Noticed
from rankzero.training import improvement, rng, strategies
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.data import stream
from rankzero.training.evaluation import GoalMissing, evaluate_goal
from rankzero.training.job import State, TrainingContext
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.optimization.joint_optimizer import parts_of
from rankzero.training.stop import EvaluationInterrupted, StopCode, StopRequest

_WAIT_SECONDS = 0.5


class PeriodicActions:
    """The evaluations and checkpoints of one training, due at the same steps on every rank.

    Only rank 0 passes `checkpoints`. On other ranks `emit` does nothing.
    """

    def __init__(
        self,
        job: TrainingContext,
        state: State,
        emit: Callable[[Event], None],
        stop: StopRequest,
        checkpoints: Checkpoints | None,
        totals: RunTotals,
    ) -> None:
        train = job.experiment.train
        self._job, self._state, self._emit, self._stop = job, state, emit, stop
        self._checkpoints, self._totals = checkpoints, totals
        self._evaluate_every = train.eval_every or job.batch_order.steps_per_epoch
        save_every = train.checkpoints.save_every
        self._save_every = self._evaluate_every if save_every is None else save_every
        self.last_step = job.total_steps
        # A training that has ended early stays complete when it is resumed.
        if improvement.early_end(job.experiment, state) and not state.evaluation_pending:
            self.last_step = state.step
        # The steps after which the trained parameters may change.
        uses_frozen = job.frozen_parts.is_used
        self._freeze_every = job.batch_order.steps_per_epoch if uses_frozen else self.last_step

    @property
    def are_due(self) -> bool:
        """Whether this step must be evaluated or saved, or the trained parameters may change."""
        # The loop asks after every step, so it is one expression without a call.
        step, save_every = self._state.step, self._save_every
        return (
            step % self._evaluate_every == 0
            or step == self.last_step
            or (save_every > 0 and step % save_every == 0)
            or step % self._freeze_every == 0
        )

    def _is_due(self, every: int) -> bool:
        step = self._state.step
        return every > 0 and (step % every == 0 or step == self.last_step)

    def run(self, stop_code: StopCode = StopCode.NONE) -> StopCode:
        """Evaluate and save if due. Return why to leave the training, or NONE. Collective.

        `stop_code`: what the ranks agreed on in their last report.
        """
        # Elsewhere rank 0's own tensors are not those of the checkpoint.
        is_whole = self._job.experiment.train.strategy in ("single", "dp", "ddp")
        if self._checkpoints is not None and self._save_every and is_whole:
            self._checkpoints.prepare(self._tensors)
        state, is_best = self._state, False
        metrics: dict[str, float] = {}
        # The newest checkpoint marks the evaluation as pending, so a new one must replace it.
        save_due = self._is_due(self._save_every) or state.evaluation_pending
        if self._is_due(self._evaluate_every) or state.evaluation_pending:
            try:
                metrics, is_best = self._evaluate()
            except EvaluationInterrupted as interrupted:
                state.evaluation_pending, stop_code = True, interrupted.code
            except GoalMissing:
                # A resume with another goal.metric repeats the evaluation, and not the steps.
                state.evaluation_pending = True
                if self._save_every:
                    self._save({}, is_best=False)
                raise
        # No later checkpoint has the best weights.
        save_due = save_due or is_best
        if self._save_every and (save_due or stop_code or state.step == self.last_step):
            self._save(metrics, is_best)
        for event in self._checkpoints.poll() if self._checkpoints else ():
            self._emit(event)
        # A stop at the last step ends nothing early, unless its evaluation is missing.
        is_complete = state.step >= self.last_step and not state.evaluation_pending
        if not is_complete and not stop_code:
            self.begin_epoch()
        return StopCode.NONE if is_complete else stop_code

    def begin_epoch(self) -> None:
        """Freeze what the experiment's `frozen` names for the next step's epoch. Collective."""
        job, step = self._job, self._state.step
        if not job.frozen_parts.is_used:
            return
        epoch = job.epoch(step)
        if job.frozen_parts.begin(epoch, job.strategy):
            _compile_again(job)
            job.work_meter.train_only(job.frozen_parts.now)
        if step == 0 or job.epoch(step - 1) != epoch:
            change = job.frozen_parts.change(epoch)
            if change:
                self._emit(Noticed(time.time(), change))

    def repeat_interrupted_evaluation(self) -> StopCode:
        """Evaluate and save as the last attempt did not, before the first step. Collective.

        Return why to leave the training, or NONE.
        """
        stopped = self.run()
        # The evaluation's batches came first here.
        _compile_again(self._job)
        return stopped

    def _evaluate(self) -> tuple[dict[str, float], bool]:
        """Return the metrics, and whether they are the best. Raises EvaluationInterrupted."""
        job, state, totals = self._job, self._state, self._totals
        metrics, is_best = evaluate_goal(job, state, self._stop)
        state.evaluation_pending, totals.last_metrics = False, metrics
        if metrics:
            self._emit(Evaluated(time.time(), state.step, metrics, is_best))
        if improvement.early_end(job.experiment, state):
            self.last_step = state.step
        is_last = state.step == self.last_step
        if job.image_capture.due(is_best, is_last, totals.train_seconds):
            with state.weights_to_evaluate():
                event = job.image_capture.take(
                    state.step, state.model, job.world.device, job.precision.autocast
                )
            if event is not None:
                self._emit(event)
        job.image_capture.forget()
        return metrics, is_best

    def _tensors(self) -> list[Tensor]:
        """Return tensors of a checkpoint's shapes. Neither a collective nor a copy."""
        weights = self._job.strategy.model_state()
        averages = {} if self._state.average is None else weights
        states = [part.state for part in parts_of(self._job.strategy.optimizer)]
        leaves = tree_leaves([weights, averages, states])
        return [one for one in leaves if isinstance(one, Tensor)]

    def _await_write(self) -> None:
        """Wait until rank 0 can save again. Collective."""
        # A slow disk may take longer than a rank may be silent. While it progresses, no rank hangs:
        # neither rank 0, nor those that wait for it.
        job, moved = self._job, -1
        while True:
            step = self._checkpoints.still_writing(_WAIT_SECONDS) if self._checkpoints else None
            mine = [step is not None, self._checkpoints.bytes_moved() if self._checkpoints else 0]
            found = torch.tensor(mine, dtype=torch.int64, device=job.world.device)
            is_writing, now = job.world.sum(found).tolist()
            if not is_writing:
                break
            if now != moved:
                job.beat(f"the checkpoint of step {step} to be written" if step else "")
            moved = now
        if moved >= 0:
            job.beat()

    def _save(self, metrics: Mapping[str, float], is_best: bool) -> None:
        self._await_write()
        if not metrics:
            # An evaluation has done so. A resume gives every rank the buffers of rank 0, and fsdp
            # and turns let them differ.
            self._job.strategy.sync_buffers()
        # Collective: every rank contributes its random state and its part of the model.
        content = state_dict(self._job, self._state)
        if self._checkpoints is None:
            return
        if isinstance(self._job.train_loader, stream.StreamLoader):
            for text in self._job.train_loader.compare(content["streams"]):
                self._emit(Noticed(time.time(), text))
        for event in self._checkpoints.save(content, self._state.step, metrics, is_best):
            self._emit(event)
        # A GPU copies to the host by itself. The loop would wait for that next, so count it here.
        begun = time.perf_counter()
        self._job.world.now()
        self._checkpoints.blocked_seconds += time.perf_counter() - begun


def _compile_again(job: TrainingContext) -> None:
    """Let torch.compile compile the next step for its own batch size."""
    # After batches of other sizes, it would compile the step for any batch size, with other bits
    # than in a training that was never interrupted.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    job.expect_slow_step()


def state_dict(job: TrainingContext, state: State) -> dict[str, Any]:
    """Return on rank 0 all that a resume needs. Collective. `restore.apply` reads it."""
    scaler, randoms = job.precision.scaler, job.world.gather(rng.state(job.world.device))
    goal = job.experiment.goal
    return {
        **job.strategy.state(),
        **({} if state.average is None else state.average.state()),
        "scaler": None if scaler is None else scaler.state_dict(),
        "randoms": randoms,
        "replica_randoms": rng.states_of_replicas(job.experiment.train.strategy),
        "model_randoms": job.model_randoms,
        "layout": strategies.layout(job.experiment.train.strategy, job.world.size),
        "options": state.options,
        "step": state.step,
        "best": state.best,
        "goal": [goal.metric, goal.mode],
        "owed": state.evaluation_pending,
        "evaluations_since_best": state.evaluations_since_best,
        "lr_reductions": state.lr_reductions,
        "batch_size": job.batch_order.batch_size,
        "seed": job.batch_order.seed,
        "samples": job.batch_order.samples,
        "lists": job.batch_order.list_count,
        "fingerprint": job.batch_order.lists_before(state.step),
        "rest": job.batch_order.rest,
        "streams": stream.states(job.train_loader, job.world),
    }

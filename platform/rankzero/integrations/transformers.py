"""A callback for Transformers.

Trainer(…, TrainingArguments(report_to="none"), callbacks=[RankZeroCallback("my-experiment")])
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankzero.integrations.deferred_run import DeferredRun
from rankzero.run_store.location import make_root, root_of
from rankzero.run_store.names import checked_run

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("Transformers is missing: pip install rankzero[transformers]") from error


# The key in a checkpoint's state. Transformers takes none of ours for a callback's.
_STATE = "rankzero"


class RankZeroCallback(TrainerCallback):
    """Sends the metrics of a `Trainer` to MLflow. `options`: those of `rankzero.track`.

    Each trial of `hyperparameter_search` is a run, and the training after it is another one. The
    `name` of a trial's run ends with the next number that no run has, from 1.
    """

    def __init__(self, experiment: str = "transformers", **options: Any) -> None:
        self._experiment, self._options, self._trials = experiment, options, 0
        self._searches = False
        self._taken: Path | None = None  # the folder of a trial that may not begin
        self._run = DeferredRun(experiment, **options)
        self._evaluated: set[str] = set()
        """The metrics of an evaluation in the newest log. `on_evaluate` gets them again."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start the run, with the training's arguments as params."""
        if state.is_hyper_param_search or self._searches:
            self._next_run(state)
        self._run.add_params(_params(args))
        # A checkpoint has the state. The step of a second training is not the run's.
        states: dict[str, Any] = state.stateful_callbacks
        self._run.next_ahead = states.get(_STATE, {}).get("attributes", {}).get("ahead")
        # Transformers reports no exception. One that the user catches would look like success.
        error = RuntimeError(
            "Trainer.train() did not reach its end, and the script caught the exception"
        )
        try:
            self._run.begin_training(state.global_step, state).unless_ended = error
        except BaseException:
            if self._taken is not None:  # If the folder is empty, its number is free again.
                with contextlib.suppress(OSError):
                    self._taken.rmdir()
            raise
        states[_STATE] = {"args": {}, "attributes": {"ahead": self._run.ahead}}

    def _next_run(self, state: TrainerState) -> None:
        """Take another run for a trial, or for the training after the trials."""
        self._run.end_unreported()
        self._run.end()
        self._searches, options = state.is_hyper_param_search, dict(self._options)
        if self._searches:
            self._trials += 1
            if state.is_world_process_zero and (name := options.get("name")) is not None:
                options["name"] = self._take_name(name, root_of(options.get("folder")))
        self._run = DeferredRun(self._experiment, **options)
        if self._searches:
            self._run.add_params({"trial": state.trial_name or self._trials})

    def _take_name(self, name: str, root: Path) -> str:
        make_root(root)
        (root / "runs").mkdir(exist_ok=True)
        while True:
            taken = checked_run(f"{name}-{self._trials}")
            # A search of another process may continue, or choose at the same moment.
            with contextlib.suppress(FileExistsError):
                (folder := root / "runs" / taken).mkdir()
                self._taken = folder
                return taken
            self._trials += 1

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Log the trainer's metrics: ``loss`` as ``train/loss``, ``eval_loss`` as ``val/loss``."""
        given, is_over = logs or {}, self._run.is_over
        # A subclass logs values of an evaluation that `on_evaluate` does not get.
        measured = {
            name: value
            for name, value in given.items()
            if name.startswith("eval_") or (is_over and name != "epoch")
        }
        found = {_grouped(name): given[name] for name in given if name not in measured}
        # An evaluation's own log has nothing else but the epoch, which the last step has logged.
        if found.keys() - {"train/epoch"}:
            self._begun(args).log(found, state.global_step)
        self._log_evaluation(args, state, measured)
        self._evaluated = {*measured}

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Log ``test_loss`` of a prediction as ``test/loss``, and what `on_log` did not get."""
        known, self._evaluated = {"epoch", *self._evaluated}, set()
        new = {name: value for name, value in (metrics or {}).items() if name not in known}
        self._log_evaluation(args, state, new)

    on_predict = on_evaluate

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End the run."""
        self._run.end()

    def _log_evaluation(
        self, args: TrainingArguments, state: TrainerState, metrics: Mapping[str, Any]
    ) -> None:
        if metrics:
            values = {_grouped(name): value for name, value in metrics.items()}
            self._begun(args).evaluated(values, state.global_step)
            # Transformers does not report that an evaluation after the training is over.
            self._run.end_if_over()

    def _begun(self, args: TrainingArguments) -> DeferredRun:
        """Return the run. One that an evaluation starts has the arguments as params, too."""
        if not self._run.has_begun:
            self._run.add_params(_params(args))
        return self._run


def _params(args: TrainingArguments) -> dict[str, Any]:
    return {name: value for name, value in args.to_sanitized_dict().items() if value is not None}


def _grouped(name: str) -> str:
    """Return a metric's name in its group."""
    # Transformers' totals of the whole training begin with train_.
    groups = {"eval_": "val", "test_": "test", "predict_": "test", "train_": "summary"}
    for prefix, group in groups.items():
        if name.startswith(prefix):
            return f"{group}/{name.removeprefix(prefix)}"
    return f"train/{name}"

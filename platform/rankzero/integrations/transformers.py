"""Transformers: a callback, for ``Trainer(callbacks=[RankZeroCallback("my-experiment")])``, `report_to="none"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankzero.integrations.deferred_run import DeferredRun

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "rankzero.integrations.transformers needs it: pip install rankzero[transformers]"
    ) from error


class RankZeroCallback(TrainerCallback):
    """Sends what a `Trainer` logs to MLflow. `options`: those of `rankzero.track` (name, goal, tracking_uri…)."""

    def __init__(self, experiment: str = "transformers", **options: Any) -> None:
        self._late = DeferredRun(experiment, **options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin the run with the training's arguments as params."""
        self._late.params(
            {name: value for name, value in args.to_sanitized_dict().items() if value is not None}
        )
        assert self._late.run is not None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Log what the trainer does: ``loss`` as ``train/loss``."""
        found = {
            _grouped(name): value
            for name, value in (logs or {}).items()
            if not name.startswith("eval_")
        }
        if found:
            self._late.run.log(found, state.global_step)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Log an evaluation: ``eval_loss`` as ``val/loss``."""
        self._late.run.evaluated(
            {_grouped(name): value for name, value in (metrics or {}).items()}, state.global_step
        )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End the run."""
        self._late.end()


def _grouped(name: str) -> str:
    """Return a metric's name in its group; Transformers' figures of the whole training begin with ``train_``."""
    for prefix, group in (("eval_", "val"), ("train_", "summary")):
        if name.startswith(prefix):
            return f"{group}/{name.removeprefix(prefix)}"
    return f"train/{name}"

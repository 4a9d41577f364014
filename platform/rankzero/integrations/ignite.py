"""A handler for Ignite: ``RankZeroHandler("my-experiment").attach(trainer, evaluator)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankzero.integrations.deferred_run import DeferredRun

try:
    from ignite.engine import Engine, Events
except ImportError as error:
    raise ImportError("Ignite is missing: pip install rankzero[ignite]") from error


class RankZeroHandler:
    """Sends a trainer's outputs and an evaluator's metrics to MLflow.

    `options`: those of `rankzero.track`.
    """

    def __init__(
        self, experiment: str = "ignite", params: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._run = DeferredRun(experiment, **options)
        self._run.add_params(params or {})

    def attach(self, trainer: Engine, evaluator: Engine | None = None) -> RankZeroHandler:
        """Log a trainer, which outputs its loss or a mapping of metrics, and its evaluator."""
        trainer.add_event_handler(Events.STARTED, self._started)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._iteration)
        trainer.add_event_handler(Events.COMPLETED, lambda _: self._run.end())
        trainer.add_event_handler(Events.EXCEPTION_RAISED, self._exception)
        if evaluator is not None:
            evaluator.add_event_handler(Events.COMPLETED, self._evaluated, trainer)
        return self

    def _started(self, trainer: Engine) -> None:
        self._run.begin_training(trainer.state.iteration)

    def _iteration(self, trainer: Engine) -> None:
        output = trainer.state.output
        metrics = output if isinstance(output, Mapping) else {"loss": output}
        values = {f"train/{name}": value for name, value in metrics.items()}
        self._run.begin().log(values, trainer.state.iteration + self._run.offset)

    def _evaluated(self, evaluator: Engine, trainer: Engine) -> None:
        metrics = {f"val/{name}": value for name, value in evaluator.state.metrics.items()}
        self._run.begin().evaluated(metrics, trainer.state.iteration + self._run.offset)

    def _exception(self, _: Engine, error: BaseException) -> None:
        self._run.end(error)
        # Ignite does not raise an exception that has a handler.
        raise error

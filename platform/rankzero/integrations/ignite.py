"""A logger for Ignite: ``RankZeroHandler("my-experiment").attach(trainer, evaluator)``.

It also is a logger as Ignite's own are: `attach_output_handler`, `attach_opt_params_handler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankzero.integrations.deferred_run import DeferredRun
from rankzero.integrations.own_loop.tracked_run import TrackedRun

try:
    from ignite.engine import Engine, Events
    from ignite.handlers.base_logger import (
        BaseLogger,
        BaseOptimizerParamsHandler,
        BaseOutputHandler,
    )
except ImportError as error:
    raise ImportError("Ignite is missing: pip install rankzero[ignite]") from error


class RankZeroHandler(BaseLogger):
    """Sends a trainer's outputs and an evaluator's metrics to MLflow.

    `options`: those of `rankzero.track`. If Ignite's `Checkpoint` also saves and loads the handler,
    a second training that is resumed keeps its steps.
    """

    def __init__(
        self, experiment: str = "ignite", params: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._run = DeferredRun(experiment, **options)
        self._run.add_params(params or {})
        self._evaluated_at: int | None = None
        """The trainer's newest evaluation, from its start to its end."""

    @property
    def run(self) -> TrackedRun:
        """The run, for everything else that it can log. Starts it."""
        return self._run.begin()

    def attach(
        self,
        engine: Engine,
        log_handler: Any = None,
        event_name: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Log a trainer and its evaluator: ``attach(trainer, evaluator)``.

        The trainer outputs its loss, or metrics as a mapping or a sequence. With an event, attaches
        a handler as Ignite's loggers do.
        """
        if event_name is not None:
            handle = super().attach(engine, log_handler, event_name, *args, **kwargs)
            # The engine may be an evaluator that runs after the training.
            engine.add_event_handler(Events.COMPLETED, self._run.end_if_over)
            return handle
        engine.add_event_handler(Events.STARTED, self._started)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._iteration)
        engine.add_event_handler(Events.COMPLETED, self._completed)
        engine.add_event_handler(Events.TERMINATE, self._terminated)
        engine.add_event_handler(Events.EXCEPTION_RAISED, self._exception)
        if log_handler is not None:
            log_handler.add_event_handler(Events.COMPLETED, self._evaluated, engine)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return how the run counts its steps, for a checkpoint."""
        return {"ahead": self._run.ahead}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Remember how the run of the checkpoint counts, for the training that comes next."""
        self._run.next_ahead = state_dict["ahead"]

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics and texts. Tensors stay on their device until the run reads them."""
        self._run.log(metrics, step)

    log_metrics = log

    def close(self) -> None:
        """End the run. A ``with`` block does it, too."""
        self._run.end()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._run.end(error)

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> OutputHandler:
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)

    def _started(self, trainer: Engine) -> None:
        self._evaluated_at = None
        self._run.begin_training(trainer.state.iteration)

    def _completed(self, trainer: Engine) -> None:
        self._evaluated_at = None
        self._run.end()

    def _terminated(self, trainer: Engine) -> None:
        if trainer.should_terminate == "skip_completed":  # Then nothing is completed.
            self._completed(trainer)

    def _iteration(self, trainer: Engine) -> None:
        values = {f"train/{name}": value for name, value in _metrics(trainer.state.output).items()}
        kept = {name: value for name, value in values.items() if _is_single(value)}
        for name in values.keys() - kept.keys():
            self._run.begin().tell(name, f"{name} is not a single value: it is not logged")
        self._run.log(kept, trainer.state.iteration)

    def _evaluated(self, evaluator: Engine, trainer: Engine) -> None:
        metrics = {f"val/{name}": value for name, value in evaluator.state.metrics.items()}
        step = trainer.state.iteration
        if step == self._evaluated_at:
            self._run.begin().tell(
                "evaluator",
                f"an evaluator ran twice at step {step}: the first values count; attach an "
                "evaluator that runs on the validation set only",
            )
        self._evaluated_at = step
        self._run.evaluated(metrics, step)
        self._run.end_if_over()

    def _exception(self, engine: Engine, error: BaseException) -> None:
        self._run.end(error)
        # Ignite raises an exception only if it has no handler. Others decide that for themselves.
        # Handlers have no public name.
        handlers = [one for one, *_ in engine._event_handlers[Events.EXCEPTION_RAISED]]
        if all(isinstance(getattr(one, "__self__", None), RankZeroHandler) for one in handlers):
            raise error


class OutputHandler(BaseOutputHandler):
    """Logs an engine's output, metrics and attributes, as ``tag/name``."""

    def __call__(self, engine: Engine, logger: RankZeroHandler, event_name: Any) -> None:
        """Log them at the step of `global_step_transform`. Raises TypeError if it is no integer."""
        _require_own(self, logger)
        step = self.global_step_transform(engine, event_name)
        if not isinstance(step, int):
            raise TypeError(f"global_step must be int, got {step!r} from global_step_transform")
        values = self._setup_output_metrics_state_attrs(engine, log_text=True, key_tuple=False)
        logger.log(values, step=step)


class OptimizerParamsHandler(BaseOptimizerParamsHandler):
    """Logs a param of an optimizer's groups, as ``tag/lr/group_0``."""

    def __call__(self, engine: Engine, logger: RankZeroHandler, event_name: Any) -> None:
        """Log them at the engine's step of the event."""
        _require_own(self, logger)
        name = f"{self.tag}/{self.param_name}" if self.tag else self.param_name
        values = {
            f"{name}/group_{number}": float(group[self.param_name])
            for number, group in enumerate(self.optimizer.param_groups)
        }
        logger.log(values, step=engine.state.get_event_attrib_value(event_name))


def _require_own(handler: object, logger: object) -> None:
    if not isinstance(logger, RankZeroHandler):
        kind = type(handler).__name__
        raise TypeError(f"{kind} works only with RankZeroHandler, got {type(logger).__name__}")


def _metrics(output: Any) -> Mapping[str, Any]:
    """Return a trainer's output as metrics."""
    if output is None or isinstance(output, Mapping):
        return output or {}
    if isinstance(output, (tuple, list)):
        return {f"output/{number}": value for number, value in enumerate(output)}
    return {"loss": output}


def _is_single(value: Any) -> bool:
    # NumPy would convert a list, and raise for lists of uneven lengths and for a GPU's tensors.
    if hasattr(value, "numel"):
        return int(value.numel()) == 1
    if isinstance(value, Sequence):
        return isinstance(value, (str, bytes))
    return not getattr(value, "ndim", 0)

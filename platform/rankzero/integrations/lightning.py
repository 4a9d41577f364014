"""Lightning: a `Logger` and a `Callback`, for ``Trainer(logger=logger, callbacks=[RankZeroCallback(logger)])``.

The logger takes what the module logs, every `log_every_n_steps`. The callback adds what a logger cannot see: the loss
of every step, without a host sync; validation metrics with the goal; checkpoints; how the training ended.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from rankzero.integrations.deferred_run import DeferredRun

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.utilities import rank_zero_only
except ImportError as error:
    raise ImportError(
        "rankzero.integrations.lightning needs Lightning: pip install rankzero[lightning]"
    ) from error

WHOLE = ("SingleDeviceStrategy", "DDPStrategy")
"""Strategies under which rank 0 has the whole model."""


class RankZeroLogger(Logger):
    """Sends what a `LightningModule` logs to MLflow. `options`: those of `rankzero.track` (name, goal and so on)."""

    def __init__(self, experiment: str = "lightning", **options: Any) -> None:
        super().__init__()
        self._experiment = experiment
        self._late = DeferredRun(experiment, **options)

    @property
    def name(self) -> str:
        return self._experiment

    @property
    def version(self) -> str | None:
        return self._late.run.name if self._late.begun else None

    @property
    def late(self) -> DeferredRun:
        """The run, for `RankZeroCallback`."""
        return self._late

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Keep params; those that come after the first metric are too late."""
        self._late.params(vars(params) if isinstance(params, Namespace) else params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics at a step."""
        self._late.run.log(
            {name: value for name, value in metrics.items() if name != "epoch"}, step or 0
        )

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the run: Lightning says success, failed or interrupted. What the callback said before counts."""
        self._late.end(
            {"success": None, "interrupted": KeyboardInterrupt()}.get(status, RuntimeError(status))
        )


class RankZeroCallback(Callback):
    """Adds to a `RankZeroLogger` every step's loss, the goal, checkpoints and the exception that ended a training."""

    def __init__(self, logger: RankZeroLogger, *, checkpoints: bool = True) -> None:
        self._late, self._checkpoints = logger.late, checkpoints

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step's loss on its device."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if trainer.is_global_zero and loss is not None:
            self._late.run.log({"train/loss": loss}, trainer.global_step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the validation metrics under their goal's name, and keep a checkpoint."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        metrics = {
            _grouped(name): value
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val")
        }
        if self._checkpoints and type(trainer.strategy).__name__ in WHOLE:
            self._late.run.checkpoint(
                {"model": pl_module.state_dict()}, trainer.global_step, metrics
            )
        else:
            self._late.run.evaluated(metrics, trainer.global_step)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End the run as FAILED, or KILLED by Ctrl-C."""
        self._late.end(exception)


def _grouped(name: str) -> str:
    """Return Lightning's customary ``val_loss`` as ``val/loss``."""
    return name.replace("val_", "val/", 1) if name.startswith("val_") else name

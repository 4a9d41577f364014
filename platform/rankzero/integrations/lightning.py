"""A `Logger` and a `Callback` for Lightning.

    logger = RankZeroLogger("my-experiment")
    Trainer(logger=logger, callbacks=[RankZeroCallback(logger)])

The logger gets what the module logs, every `log_every_n_steps`. The callback adds what a logger
cannot see: the loss of every step without a host sync, validation metrics with the goal,
checkpoints, and how the training ended.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, TypeGuard

from rankzero.errors import UserError
from rankzero.integrations.deferred_run import DeferredRun
from rankzero.integrations.own_loop.params import params_of
from rankzero.integrations.own_loop.process_end import Stopped
from rankzero.integrations.own_loop.tracked_run import TrackedRun

try:
    from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.loggers.logger import rank_zero_experiment
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.utilities import rank_zero_only
    from lightning.pytorch.utilities.exceptions import SIGTERMException
except ImportError as error:
    raise ImportError("Lightning is missing: pip install rankzero[lightning]") from error

# Rank 0 has the whole model only under these strategies. Elsewhere it could not write a checkpoint
# alone.
_REPLICATED = ("SingleDeviceStrategy", "DDPStrategy", "RayDDPStrategy")
_DIVIDED = (
    " may divide the model: the run keeps no checkpoints; use RankZeroLogger(log_checkpoints=True) "
    "and a ModelCheckpoint"
)
# Lightning 2.6.
_AVERAGING = getattr(callbacks, "WeightAveraging", ())
_LOSS = "train/loss"


class RankZeroLogger(Logger):
    """Sends the metrics of a `LightningModule` to MLflow. `options`: those of `rankzero.track`.

    `prefix`: what the names of all metrics begin with, as ``prefix-name``.
    `log_checkpoints`: whether MLflow also gets each checkpoint that Lightning's `ModelCheckpoint`
    saves, also a sharded one. Rank 0 must see the files of all ranks, and copies them.
    """

    def __init__(
        self,
        experiment: str = "lightning",
        *,
        prefix: str = "",
        log_checkpoints: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._experiment, self._prefix = experiment, f"{prefix}-" if prefix else ""
        self._log_checkpoints = log_checkpoints
        self.deferred_run = DeferredRun(experiment, **options)
        """Shared with `RankZeroCallback`."""
        self.newest_step = 0
        """The newest step of a `RankZeroCallback`, from 1; 0 without one."""
        self.trainer: Trainer | None = None
        """That of the callback's training, until its end."""
        self._begins = False
        """Whether a training without a `RankZeroCallback` begins with the next metrics."""
        self._has_folder = self._is_async = False
        self._unwritten: list[str] = []
        """The checkpoints that a thread of Lightning writes until the training ends."""

    @property
    def name(self) -> str:
        # Lightning joins it to the folder of checkpoints, which "/Users/me" and ".." would leave.
        return self._experiment.lstrip("/.")

    @property
    @rank_zero_experiment
    def experiment(self) -> TrackedRun:
        """The run, for everything else that it can log. Starts it."""
        return self.deferred_run.begin()

    @property
    @rank_zero_only
    def version(self) -> str | None:
        # Other ranks may not know yet that they are others: Lightning's launcher sets no RANK.
        return self.deferred_run.name

    @property
    @rank_zero_only
    def save_dir(self) -> str | None:
        """The folder for LightningCLI's files, in the run's. Starts the run.

        None in other programs: Lightning's files lie below the trainer's ``default_root_dir``.
        """
        if "lightning.pytorch.cli" not in sys.modules:
            return None
        if (run := self.deferred_run.begin().folder) is None:
            return None
        folder, was_asked, self._has_folder = run / "lightning", self._has_folder, True
        # LightningCLI refuses to replace the settings of the call that this one continues.
        if not was_asked and (former := folder / "config.yaml").exists():
            names = (folder / f"config_{number}.yaml" for number in itertools.count(1))
            former.rename(next(name for name in names if not name.exists()))
        return str(folder)

    @rank_zero_only
    def log_hyperparams(
        self, params: object = None, metrics: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Add params, at any time: a mapping, a namespace, a dataclass, or None."""
        notes = list[tuple[str, str]]()
        self.deferred_run.add_params(params_of(params, lambda *note: notes.append(note)))
        for about, text in notes:
            self.deferred_run.begin().tell(about, text)
        if metrics:
            self.log_metrics(metrics)

    def log_graph(self, model: LightningModule, input_array: Any = None) -> None:
        """Note whether a training begins. Lightning calls it then, and before a test."""
        # The public name raises without a trainer.
        trainer = getattr(model, "_trainer", None)
        self._begins = trainer is not None and trainer.state.fn == "fit"
        if trainer is None:
            return
        self._is_async = isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO)
        for one in trainer.callbacks:
            if isinstance(one, RankZeroCallback) and one._logger is self:
                self._begins = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics at a step."""
        run = self.deferred_run
        if self._begins and step is not None:
            self._begins = False
            self._begin_training(step)
        # Lightning counts the steps before a batch, the callback counts it too. A metric of both
        # must not have two points. Values of an evaluation's single batches have the batch's number
        # as their step, and no epoch.
        trains = self.trainer is not None and self.trainer.training
        has_step = trains or "epoch" in metrics
        if has_step and self.newest_step and step == self.newest_step - 1:
            step = self.newest_step
        elif trains and self._is_of_next(step):
            step += 1
        values = {f"{self._prefix}{name}": metrics[name] for name in metrics if name != "epoch"}
        if "epoch" in metrics and step is not None:
            run.log(*run.final(values, step or self.newest_step))
        else:
            run.log(values, step)

    def _begin_training(self, step: int) -> None:
        """Begin a training by its first step with metrics, as nothing else reports it."""
        run = self.deferred_run
        is_second = run.has_trained and step + run.ahead <= run.begin().highest_step
        try:
            run.begin_training(0 if is_second else step)
        except UserError as error:  # The training runs already, and the other ranks go on.
            run.begin().tell("fork", str(error))
        # Without the callback, the steps begin at 0.
        run.ahead += is_second

    def _is_of_next(self, step: int | None) -> TypeGuard[int]:
        """Return whether a batch of the step after this one runs, as for LearningRateMonitor."""
        # Callbacks may come before ours, so `newest_step` does not tell.
        assert self.trainer is not None
        loop = self.trainer.fit_loop.epoch_loop
        progress = loop.batch_progress.current
        return bool(progress.ready > progress.completed and step == loop._batches_that_stepped)

    def logs_loss(self, trainer: Trainer) -> bool:
        """Return whether the module logs a ``train/loss`` of its own, as a mean over the ranks."""
        # No public name has those of an epoch before its end.
        logged = (one.meta for one in (trainer._results or {}).values() if one.meta.logger)
        # Those of single steps are rank 0's too, and rarer, unless the module has them averaged.
        means = (one for one in logged if one.sync.should or not one.on_step)
        # With both, Lightning appends _step and _epoch to the name.
        names = [one.name for one in means if not (one.on_step and one.on_epoch)]
        return not self._prefix and _LOSS in names

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Copy the checkpoint that was saved just now. Lightning calls it on rank 0.

        With `AsyncCheckpointIO`, the end of a training that succeeds copies those that are left.
        """
        if self._log_checkpoints:
            # A public name exists only for the best checkpoint, and for one that is called last.
            self._unwritten.append(checkpoint_callback._last_checkpoint_saved)
            if not self._is_async:
                self._copy_checkpoints()

    def _copy_checkpoints(self) -> None:
        saved, self._unwritten = self._unwritten, []
        # A thread may have written one several times, and Lightning deletes all but the best.
        for path in dict.fromkeys(saved):
            if path == saved[-1] or Path(path).exists():
                self.deferred_run.begin().log_artifact(path, "checkpoints")

    def finalize(self, status: str) -> None:
        """End the run with Lightning's status, unless the callback has ended it before."""
        # It holds the model and the optimizer, on every rank.
        self.trainer = None
        self._end(status)

    @rank_zero_only
    def _end(self, status: str) -> None:
        # Slurm's requeue reports "finished". A failure is reported while its exception is handled.
        is_success = status in ("success", "finished")
        error = None if is_success else sys.exception() or RuntimeError(f"the training {status}")
        # Lightning waits for its thread before this, but not if the training failed.
        if is_success:
            self._copy_checkpoints()
        self._unwritten.clear()
        self.deferred_run.end(_with_signal(error))


class RankZeroCallback(Callback):
    """Adds to a `RankZeroLogger` the loss of every step, the goal, checkpoints and the end.

    `logger`: by default the trainer's first `RankZeroLogger`.
    """

    def __init__(self, logger: RankZeroLogger | None = None, *, checkpoints: bool = True) -> None:
        self._finds_logger = logger is None
        # Without one, a logger that nothing uses, until `setup`.
        self._logger = logger or RankZeroLogger()
        self._run, self._checkpoints = self._logger.deferred_run, checkpoints
        self._losses: list[Any] = []
        """The losses of the micro-batches of a step that is not finished."""
        self._of_epoch_before: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the logger, if none was given. Raises UserError if the trainer has none."""
        # Lightning replaces all loggers in a trial.
        if self._finds_logger and not trainer.fast_dev_run:
            found = next((one for one in trainer.loggers if isinstance(one, RankZeroLogger)), None)
            if found is None:
                raise UserError(
                    "RankZeroCallback finds no logger: use Trainer(logger=RankZeroLogger(…))"
                )
            self._logger, self._run = found, found.deferred_run
        # Lightning does not call it with `enable_autolog_hparams=False`.
        self._logger.log_graph(pl_module)
        # A validation may have loaded a checkpoint of another training.
        self._run.next_ahead = None

    def state_dict(self) -> dict[str, Any]:
        """Return how the run of Lightning's checkpoint counts its steps."""
        return {"ahead": self._run.ahead}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember how the run of the checkpoint counts, for the training that comes next."""
        self._run.next_ahead = state_dict["ahead"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the run, or an attempt of it; none for a trial with `fast_dev_run`."""
        if trainer.fast_dev_run:
            return
        self._losses.clear()
        self._logger.newest_step, self._logger.trainer = 0, trainer
        if not trainer.is_global_zero:
            return
        # Older versions counted a step of each optimizer, and kept nothing in the checkpoint.
        run, is_unknown = self._run, self._run.next_ahead is None
        # Only a module that steps by itself has several optimizers.
        if is_unknown and not (run.has_trained or pl_module.automatic_optimization):
            batches = trainer.fit_loop.epoch_loop._batches_that_stepped
            run.next_ahead = trainer.global_step - batches
        run.begin_training(trainer.global_step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the metrics of the epoch before, and drop losses that are left of it."""
        # Those of a step that the module broke off.
        self._losses.clear()
        self._of_epoch_before = {**trainer.callback_metrics}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step's loss on its device: the mean over its micro-batches."""
        if trainer.fast_dev_run:
            return
        # Several optimizers are one step, as for Lightning's loggers. It has no public name.
        loop = trainer.fit_loop.epoch_loop
        accumulates = loop._should_accumulate()
        # A validation within an accumulated step is one of the step before.
        self._logger.newest_step = loop._batches_that_stepped + (not accumulates)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if trainer.is_global_zero and loss is not None:
            self._losses.append(loss)
        if accumulates or not self._losses:
            return
        # Lightning has divided each loss by the number of micro-batches. An epoch's last step may
        # have fewer.
        loss, share = reduce(add, self._losses), trainer.accumulate_grad_batches / len(self._losses)
        self._losses.clear()
        if not self._logger.logs_loss(trainer):
            self._run.log({_LOSS: loss if share == 1 else loss * share}, self._step(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the validation metrics in their group, and keep a checkpoint in a training."""
        # Lightning validates a few batches before the training, which is not an evaluation.
        is_trial = trainer.sanity_checking or trainer.fast_dev_run
        if is_trial or not trainer.is_global_zero:
            return
        self._note_metrics_of_one_rank(trainer)
        metrics = self._measured(trainer)
        # `validate` may have loaded other weights: they are not the training's newest.
        saves = self._checkpoints and trainer.state.fn == "fit"
        if saves and type(trainer.strategy).__name__ in _REPLICATED:
            saved = {"state_dict": pl_module.state_dict()}
            for one in trainer.callbacks:
                # The validation was of the averages, which it puts in the place of the weights.
                if isinstance(one, _AVERAGING):
                    one.on_save_checkpoint(trainer, pl_module, saved)
            self._run.checkpoint({"model": saved["state_dict"]}, self._step(trainer), metrics)
            return
        if saves and not self._logger._log_checkpoints:
            self._run.begin().tell("divided", type(trainer.strategy).__name__ + _DIVIDED)
        self._run.evaluated(metrics, self._step(trainer))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End the run as FAILED, or KILLED by Ctrl-C or SIGTERM."""
        if not trainer.fast_dev_run:
            self._run.end(_with_signal(exception))

    def _measured(self, trainer: Trainer) -> dict[str, Any]:
        metrics, goal = dict[str, Any](), self._run.goal.metric
        for name, value in trainer.callback_metrics.items():
            # "val_loss" is the usual name in Lightning. A run has groups: "val/loss".
            grouped = name.replace("val_", "val/", 1) if name.startswith("val_") else name
            if value is self._of_epoch_before.get(name):
                continue
            if goal in (name, grouped):
                metrics[goal] = value
            elif name.startswith("val"):
                metrics[grouped] = value
        return metrics

    def _note_metrics_of_one_rank(self, trainer: Trainer) -> None:
        # An object of torchmetrics has the samples of all ranks.
        logged = (one.meta for one in (trainer._results or {}).values() if one.is_tensor)
        names = ", ".join(dict.fromkeys(one.name for one in logged if not one.sync.should))
        if names and trainer.world_size > 1:
            text = f"{names}: the values of rank 0. Log them with sync_dist=True, or reduce them"
            self._run.begin().tell("sync_dist", text)

    def _step(self, trainer: Trainer) -> int:
        # `validate` may come without a training.
        return self._logger.newest_step or trainer.global_step


def _with_signal(error: BaseException | None) -> BaseException | None:
    """Return the error, or what names the signal if Lightning stopped for one."""
    # Lightning's own is an exit without a code, as of a script that succeeds.
    return Stopped("SIGTERM") if isinstance(error, SIGTERMException) else error

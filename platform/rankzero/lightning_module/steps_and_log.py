"""A `LightningModule` in the loop: a forward is a step and returns the step's metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rankzero import ranks
from rankzero.errors import UserError
from rankzero.experiment import Train
from rankzero.training_position import Progress

# Lightning users put these before a metric's name, in training (True) and validation. The journal
# has groups instead.
_PREFIXES = {
    True: ("train_", "train/"),
    False: ("val_", "val/", "valid_", "valid/", "validation_", "validation/"),
}
LIGHTNINGS_OWN = "train with Lightning's own Trainer and rankzero.integrations.lightning"

_COUNTS = {
    "estimated_stepping_batches",
    "max_epochs",
    "max_steps",
    "num_training_batches",
    "steps_per_epoch",
}


class TrainerStub:
    """Has the attributes that modules commonly read. Any other raises a UserError."""

    # A module may set or compare these. RankZero's loop has nothing behind them.
    sanity_checking = fast_dev_run = False
    logger = progress_bar_callback = None
    loggers: tuple[Any, ...] = ()

    def __init__(self, train: Train, datamodule: Any = None) -> None:
        self._train, self.datamodule = train, datamodule
        # `see` sets these, and the module's forward sets `training`.
        self.global_step, self.current_epoch, self.batch_index = 0, 0, 0
        self.training = True
        self._at: Progress | None = None
        self._forwards_before = 0
        mine = ranks.detect()
        # A batch of Lightning's is what one forward of a rank gets.
        share = (train.micro_batch or train.batch_size) * mine.world_size
        self.accumulate_grad_batches = max(1, train.batch_size // share)
        self.global_rank, self.is_global_zero = mine.rank, mine.first
        self.local_rank, self.world_size = mine.local_rank, mine.world_size

    def count_steps(self, samples: int) -> None:
        """Set the numbers that follow from the number of samples in the training set."""
        train = self._train
        whole, rest = divmod(samples, train.batch_size)
        rest = 0 if train.drop_last else rest
        self.steps_per_epoch = max(1, whole + (rest > 0))
        shorter = -(-rest * self.accumulate_grad_batches // train.batch_size)
        self.num_training_batches = max(1, whole * self.accumulate_grad_batches + shorter)
        steps = train.steps or (train.epochs or 0) * self.steps_per_epoch
        self.estimated_stepping_batches = self.max_steps = steps
        self.max_epochs = -(-steps // self.steps_per_epoch)

    def see(self, at: Progress) -> None:
        """Set the place of the next forward, with its `batch_idx`, for the module."""
        # Each step and each evaluation has a `Progress` of its own.
        self._forwards_before = self._forwards_before + 1 if at is self._at else 0
        self._at, self.global_step, self.current_epoch = at, at.step, at.epoch
        # A resume may begin inside an epoch, so the step tells how many batches were before.
        before = at.step % self.steps_per_epoch * self.accumulate_grad_batches
        self.batch_index = self._forwards_before + (before if at.training else 0)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for special methods, and must get an AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _COUNTS:
            raise UserError(
                f"trainer.{name} is read while the data are made, and it follows from their "
                "number: read it in configure_optimizers"
            )
        raise UserError(
            f"the module reads trainer.{name}, which RankZero's loop does not have: do without it, "
            f"or {LIGHTNINGS_OWN}"
        )


class LightningSteps(nn.Module):
    """Wraps a module so that DDP, FSDP or a compiler sees its steps as its forward."""

    def __init__(self, module: Any, trainer: TrainerStub) -> None:
        if not module.automatic_optimization:
            raise UserError(
                "the module optimizes by hand (automatic_optimization=False), which RankZero's "
                f"loop does not support: {LIGHTNINGS_OWN}"
            )
        super().__init__()
        self.module, self.trainer = module, trainer
        self._logged: dict[str, Any] = {}
        module.trainer = trainer
        # It may make layers, so it comes before everything that looks at them.
        module.setup("fit")
        # A module inside the module logs, too.
        for part in module.modules():
            if hasattr(part, "training_step"):
                part.log = self._keep
        # Those of torchmetrics, which has no public name for the value of the last batch.
        self._metrics = [part for part in module.modules() if hasattr(part, "_forward_cache")]
        self._steps = {True: _caller(module.training_step), False: _caller(module.validation_step)}

    @property
    def served(self) -> nn.Module:
        """The user's own module, which is logged as the best model."""
        module: nn.Module = self.module
        return module

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the step's loss and what it logs, by names without ``train_`` and ``val_``."""
        # A step may log other names than the step before.
        self._logged.clear()
        trainer = self.trainer
        trainer.training = self.training
        result = self._steps[self.training](batch, trainer.batch_index)
        found = metrics_of(result, self._logged, training=self.training)
        for metric in self._metrics:
            # RankZero takes the value of each batch. A metric that goes on would keep all outputs.
            if metric._forward_cache is not None:
                metric.reset()
        return found

    def _keep(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        """Replace `LightningModule.log`. RankZero averages every metric over samples and ranks."""
        self._logged[name] = value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LightningSteps:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        first = next(self.module.parameters(), None)
        if first is not None:
            # Only `to` updates Lightning's `self.device`.
            self.module.to(first.device)
        return self


def metrics_of(result: Any, logged: Mapping[str, Any], *, training: bool) -> dict[str, Tensor]:
    """Return what a step returned and logged, loss first. Raises UserError without a loss."""
    _refuse_uncalled(logged)
    named = {}
    for name, value in logged.items():
        prefix = next((one for one in _PREFIXES[training] if name.startswith(one)), "")
        named[name.removeprefix(prefix)] = value
    returned = result.get("loss") if isinstance(result, Mapping) else result
    logged_loss = named.pop("loss", None)
    # In validation, the value that is called the loss is the loss. Lightning ignores the other.
    if logged_loss is not None and not training:
        loss = _value(logged_loss, getattr(returned, "device", None))
    elif isinstance(returned, Tensor) and not returned.dim():
        loss = returned
    else:
        wanted = "validation_step must log val_loss or return it"
        raise UserError(
            f"{'training_step must return the loss' if training else wanted}, or a dict with the "
            f"key 'loss'; it returned {type(result).__name__}"
        )
    return {"loss": loss, **{name: _value(one, loss.device) for name, one in named.items()}}


def _refuse_uncalled(logged: Mapping[str, Any]) -> None:
    for name, value in logged.items():
        if isinstance(value, nn.Module) and getattr(value, "_forward_cache", None) is None:
            raise UserError(
                f"log({name!r}): the step has not called the metric: call it for each batch, as "
                "self.metric(output, target), and not its update()"
            )


def _value(value: Any, device: torch.device | None) -> Tensor:
    """Return a logged value as a 0-d tensor."""
    batch_value = getattr(value, "_forward_cache", None)
    value = value if batch_value is None else batch_value
    if isinstance(value, Tensor):
        found: Tensor = value.detach().reshape(()) if value.numel() == 1 else value.detach()
        if found.dim() or not found.is_cpu or device in (None, found.device):
            return found
        value = found
    # A copy from the host would wait for the device, `full` does not.
    return torch.full((), float(value), dtype=torch.float32, device=device)


def _caller(step: Callable[..., Any]) -> Callable[[Any, int], Any]:
    """Return a step that takes batch and index. Lightning allows a step without an index."""
    takes = inspect.signature(step).parameters
    several = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in takes.values())
    if "batch_idx" in takes or several or len(takes) > 1:
        return step
    return lambda batch, _: step(batch)

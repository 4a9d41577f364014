"""A `LightningModule` as an experiment: its arguments are the fields, its steps are `measure`.

RankZero's loop trains it, so what Lightning's `Trainer` alone does is refused by name rather than left out unsaid.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from rankzero.errors import UserError
from rankzero.experiment import Experiment, Goal, Train
from rankzero.lightning_module import data as loaders
from rankzero.lightning_module.init_arguments import (
    BATCH_SIZE,
    LEARNING_RATES,
    arguments_for,
    batch_size_of,
    fields_of,
    learning_rate,
)
from rankzero.lightning_module.lr_schedule import ReplayedScheduler, configured, undone
from rankzero.lightning_module.steps import LightningSteps
from rankzero.lightning_module.trainer_stub import TrainerStub

HARMLESS = {"on_fit_end", "on_train_end", "on_save_checkpoint", "on_load_checkpoint", "on_gpu"}
HOOKS = {
    "backward",
    "configure_gradient_clipping",
    "configure_model",
    "configure_sharded_model",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
}
"""What a `Trainer` calls and RankZero's loop does not, besides everything that begins with ``on_``."""
OTHER_STAGES = ("on_test_", "on_predict_")
SETTINGS = {"train": Train, "goal": Goal, "search": Mapping}
FRAMEWORK = ("lightning", "pytorch_lightning", "torch")


@dataclasses.dataclass(frozen=True)
class Source:
    """What a file has of Lightning."""

    module: type[Any]
    data_module: type[Any] | None
    data: Callable[[], Any] | None
    """The function beside the module, if there is one."""


class LightningExperiment(Experiment):
    """The experiment that a `LightningModule` is; `adopt` derives a class of it for each."""

    source: ClassVar[Source]

    def data(self) -> tuple[Any, Any]:
        return self._loaded.train, self._loaded.val

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        collate: Callable[[list[Any]], Any] = self._loaded.collate
        return collate  # the user's own function, which loading processes can be sent

    def model(self) -> LightningSteps:
        trainer = TrainerStub(self.train, len(self._loaded.train), self._data_module)
        return LightningSteps(self._made(self.source.module), trainer)

    def measure(self, model: nn.Module, batch: Any) -> Any:
        return model(batch)

    def optimizer(self, model: Any) -> Any:
        optimizer, scheduler, interval, frequency = configured(model.module.configure_optimizers())
        steps = frequency * (model.trainer.num_training_batches if interval == "epoch" else 1)
        factors = None if scheduler is None else ReplayedScheduler(optimizer, scheduler)
        if factors is not None and (self.train.schedule != "constant" or self.train.warmup_steps):
            raise UserError(
                "configure_optimizers has a scheduler: leave train.schedule=constant and no warm-up, or it"
            )
        vars(self)["_playing"] = model.trainer, factors, steps
        return undone(optimizer)

    def schedule(self, step: int, total_steps: int) -> float:
        trainer, factors, steps_each = vars(self)["_playing"]
        trainer.global_step = step  # the loop asks before each step: so the module knows it, too
        return (
            super().schedule(step, total_steps)
            if factors is None
            else factors.after(step // steps_each)
        )

    @functools.cached_property
    def _data_module(self) -> Any:
        return None if self.source.data_module is None else self._made(self.source.data_module)

    @functools.cached_property
    def _loaded(self) -> loaders.LoadedData:
        if self.source.data is not None:
            return loaders.from_pair(self.source.data())
        return loaders.from_hooks(self._data_module or self._made(self.source.module))

    def _made(self, cls: type[Any]) -> Any:
        """Return an object of the user's class, its arguments taken from the fields."""
        values = {name.rstrip("_"): value for name, value in vars(self).items()}
        rates = dict.fromkeys(LEARNING_RATES, self.lr)
        return cls(**arguments_for(cls, {**values, **rates, BATCH_SIZE: self.train.batch_size}))


def adopt(
    module: type[Any], data_modules: Sequence[type[Any]], beside: Mapping[str, Any]
) -> type[Experiment]:
    """Return the experiment that a `LightningModule` is, with what its file has `beside` it.

    That is ``data()``, and ``train = Train(…)``, ``goal = Goal(…)``, ``search = {…}`` for the defaults. Raises
    UserError where it is none.
    """
    data = beside.get("data")
    data_module = None if data is not None else _only(data_modules, module)
    if data is None and data_module is None and not loaders.has_loaders(module):
        raise UserError(
            f"{module.__name__} has no data: put a LightningDataModule or a function data() beside it"
        )
    classes = [module, *([data_module] if data_module else [])]
    for cls in classes:
        _refuse_hooks(cls)
    fields = fields_of(classes)
    namespace = {
        "__module__": module.__module__,
        "__qualname__": module.__qualname__,
        "__doc__": module.__doc__,
        "__annotations__": {
            "train": Train,
            "goal": Goal,
            "lr": float,
            **{name: kind for name, (kind, _) in fields.items()},
        },
        **{name: default for name, (_, default) in fields.items()},
        "train": _train_of(classes),
        **{
            name: beside[name]
            for name, kind in SETTINGS.items()
            if isinstance(beside.get(name), kind)
        },
        "lr": learning_rate(module),
        "source": Source(module, data_module, data),
    }
    return type(module.__name__, (LightningExperiment,), namespace)


def _train_of(classes: Sequence[type[Any]]) -> Train:
    """Return the training's defaults, with the batch size that the user's classes have by default."""
    sizes = [size for size in map(batch_size_of, classes) if size is not None]
    return Train(batch_size=sizes[0]) if sizes else Train()


def _only(data_modules: Sequence[type[Any]], module: type[Any]) -> type[Any] | None:
    if len(data_modules) > 1:
        names = ", ".join(cls.__name__ for cls in data_modules)
        raise UserError(
            f"several data modules beside {module.__name__}: {names}; leave one, or write data()"
        )
    return data_modules[0] if data_modules else None


def _refuse_hooks(cls: type[Any]) -> None:
    """Raise UserError where a class relies on what RankZero's loop does not call."""
    own = {
        name
        for parent in cls.__mro__
        if not parent.__module__.startswith(FRAMEWORK)
        for name in vars(parent)
    }
    missed = sorted(
        name
        for name in own
        if name in HOOKS
        or (name.startswith("on_") and name not in HARMLESS and not name.startswith(OTHER_STAGES))
    )
    if missed:
        raise UserError(
            f"{cls.__name__} defines {', '.join(missed)}, which RankZero's loop does not call: do without, or "
            "train with Lightning's own Trainer and rankzero.integrations.lightning"
        )

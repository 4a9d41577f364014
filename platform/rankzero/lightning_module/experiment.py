"""A `LightningModule` as an experiment: its arguments are the fields, its steps are `measure`.

RankZero's loop trains it. A module that needs what only Lightning's `Trainer` does is refused, with
the name of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar

from torch import nn

from rankzero.errors import UserError
from rankzero.experiment import Experiment, Goal, Train
from rankzero.lightning_module import IGNORED, init_arguments
from rankzero.lightning_module import data as loaders
from rankzero.lightning_module.lr_schedule import ReplayedScheduler, optimizer_and_scheduler
from rankzero.lightning_module.steps_and_log import LIGHTNINGS_OWN, LightningSteps, TrainerStub
from rankzero.training_position import Progress

# A property of older modules, and no hook.
_HARMLESS = {"on_gpu"}
# A `Trainer` calls these and RankZero's loop does not, and everything that begins with on_.
_HOOKS = {
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_model",
    "configure_sharded_model",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "training_epoch_end",
    "transfer_batch_to_device",
    "validation_epoch_end",
}
# Checkpoints have no state of a data module. A module's own `state_dict` is called.
_DATA_HOOKS = _HOOKS | {"load_state_dict", "state_dict"}
_OTHER_STAGES = ("on_test_", "on_predict_")
_FRAMEWORK = {"lightning", "lightning_fabric", "pytorch_lightning", "torch"}


@dataclasses.dataclass(frozen=True)
class _Source:
    """The classes and functions of a user's file that an experiment is made of."""

    module: type[Any]
    data_module: type[Any] | None
    data: Callable[[], Any] | None
    """The function ``data()``, if there is one."""


class _LightningExperiment(Experiment):
    """The base of the experiments that `adopt` makes, one class for each `LightningModule`."""

    source: ClassVar[_Source]
    _scheduler: ClassVar[ReplayedScheduler | None] = None

    def data(self) -> tuple[Any, Any]:
        return self._lightning_data.train, self._lightning_data.val

    # A property, not a method: a loader process needs the user's own function, because a method
    # would carry the whole experiment there.
    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        return self._lightning_data.collate

    def model(self) -> LightningSteps:
        # The data come first: the trainer stub tells the module how many steps an epoch has.
        trainer, module = self._counted_trainer, self._instance(self.source.module)
        # A module with loaders of its own has prepared for them.
        if self.source.data or self.source.data_module:
            loaders.prepare(module)
        return LightningSteps(module, trainer)

    def measure(self, model: nn.Module, batch: Any, at: Progress) -> Any:
        # The module has no other way to learn the step.
        self._counted_trainer.see(at)
        return model(batch)

    def optimizer(self, model: Any) -> Any:
        found = model.module.configure_optimizers()
        optimizer, scheduler, interval, frequency = optimizer_and_scheduler(found)
        if scheduler is not None:
            if self.train.schedule != "constant" or self.train.warmup_steps:
                fix = "remove it, or set train.schedule=constant and train.warmup_steps=0"
                raise UserError(f"configure_optimizers has a scheduler: {fix}")
            # Lightning's default interval is an epoch, RankZero's loop counts steps.
            epoch = self._counted_trainer.steps_per_epoch
            every = frequency * (epoch if interval == "epoch" else 1)
            # The experiment is frozen, its dictionary is not.
            vars(self)["_scheduler"] = ReplayedScheduler(optimizer, scheduler, every)
        # A scheduler's constructor sets the rates of its first step, and keeps the old ones here.
        for group in optimizer.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        return optimizer

    def schedule(
        self, step: int, total_steps: int, *_: Any
    ) -> float | Sequence[float] | Mapping[str, float]:
        if self._scheduler is None:
            return super().schedule(step, total_steps)
        return self._scheduler.after(step)

    @property
    def _loader_note(self) -> str:
        found, used, ranks = self._lightning_data.batch_size, self.train.batch_size, self._trainer
        # A loader of one rank may have its share of the batch.
        if found in (None, used, used // ranks.world_size):
            return ""
        return f"the training loader has batch_size={found}, the run train.batch_size={used}"

    # cached_property writes to the instance's dictionary, so it also works on a frozen dataclass.
    @functools.cached_property
    def _counted_trainer(self) -> TrainerStub:
        self._trainer.count_steps(len(self._lightning_data.train))
        return self._trainer

    @functools.cached_property
    def _trainer(self) -> TrainerStub:
        return TrainerStub(self.train, self._data_module)

    @functools.cached_property
    def _data_module(self) -> Any:
        return None if self.source.data_module is None else self._instance(self.source.data_module)

    @functools.cached_property
    def _lightning_data(self) -> loaders.LoadedData:
        if self.source.data is not None:
            return loaders.from_pair(self.source.data())
        source = self._data_module or self._instance(self.source.module)
        # It may read the ranks.
        source.trainer = self._trainer
        return loaders.from_hooks(source)

    def _instance(self, cls: type[Any]) -> Any:
        """Return an object of the user's class, with the experiment's fields as its arguments."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return cls(**init_arguments.values_for(cls, fields, self.lr, self.train.batch_size))


def adopt(
    module: type[Any], data_modules: Sequence[type[Any]], names: Mapping[str, Any]
) -> type[Experiment]:
    """Return a `LightningModule` as an experiment.

    `names`: those of its file: ``data()``, and ``train = Train(…)``, ``goal = Goal(…)``, ``search =
    {…}`` for the defaults. Raises UserError if the module has no data. `refuse_new` refuses its
    hooks.
    """
    data = names.get("data")
    if data is not None:
        data_modules = []
    if len(data_modules) > 1:
        found = ", ".join(cls.__name__ for cls in data_modules)
        raise UserError(
            f"{module.__name__} has several data modules: {found}; leave one in the file, or write "
            "a function data()"
        )
    if data is None and not data_modules and not loaders.has_loaders(module):
        fix = "add a LightningDataModule or a function data() to its file"
        raise UserError(f"{module.__name__} has no data: {fix}")
    classes = [module, *data_modules]
    ignored = [_ignored(cls, _HOOKS if cls is module else _DATA_HOOKS) for cls in classes]
    fields = init_arguments.fields_of(classes)
    sizes = [init_arguments.parameters(cls).get(init_arguments.BATCH_SIZE) for cls in classes]
    batch_sizes = [one.default for one in sizes if one and type(one.default) is int]
    train = names["train"] if isinstance(names.get("train"), Train) else Train()
    # A batch size that the file gives `Train` comes first, and a data module's before the module's.
    if batch_sizes and train.batch_size == Train.batch_size:
        train = dataclasses.replace(train, batch_size=batch_sizes[-1])
    kinds = {"goal": Goal, "search": Mapping}
    # Each module gets a class of its own, because the fields of an experiment belong to its class.
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
        "train": train,
        **{name: names[name] for name, kind in kinds.items() if isinstance(names.get(name), kind)},
        "lr": init_arguments.learning_rate(module, ignored),
        "source": _Source(module, next(iter(data_modules), None), data),
        IGNORED: next(filter(None, ignored), "") or init_arguments.clash_of(classes),
    }
    return type(module.__name__, (_LightningExperiment,), namespace)


def _ignored(cls: type[Any], hooks: Set[str]) -> str:
    """Return which of `hooks`, and of others that the loop does not call, a class defines."""
    # Lightning's base classes define every hook, so only the classes of the user count. Their file
    # may be called lightning_mnist.py.
    own = {
        name
        for parent in cls.__mro__
        if parent.__module__.partition(".")[0] not in _FRAMEWORK
        for name in vars(parent)
    }
    found = sorted(
        name
        for name in own
        if name in hooks
        or (name.startswith("on_") and name not in _HARMLESS and not name.startswith(_OTHER_STAGES))
    )
    if not found:
        return ""
    return (
        f"{cls.__name__} defines {', '.join(found)}, which RankZero's loop does not call: remove "
        f"it, or {LIGHTNINGS_OWN}"
    )

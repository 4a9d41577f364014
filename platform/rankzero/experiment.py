"""The `Experiment` that a user writes: fields are settings, methods are pure factories.

All but `is_outdated` is pure.

class Digits(Experiment):
    train: Train = Train(epochs=10, batch_size=256)
    goal = Goal("val/accuracy", "max", target=0.97)
    width: int = 32

    def data(self): return training_set, validation_set
    def model(self): return convnet(self.width)
    def measure(self, model, batch): return {"loss": …, "accuracy": …}
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import numbers
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, dataclass_transform

from rankzero.config import ConfigError, check_types
from rankzero.config.renamed import new_name
from rankzero.lr_schedules import factor
from rankzero.search_ranges import Range

Precision = Literal["fp32", "tf32", "bf16", "fp16"]


def _require_all(
    config: object, names: Sequence[str], at_least: float = -math.inf, above: float = -math.inf
) -> None:
    """Raise ValueError if one of these settings is no number or below its bound. None passes."""
    for name in names:
        value = getattr(config, name)
        is_number = value is None or isinstance(value, numbers.Real)  # or one of NumPy's
        if not is_number:
            raise ValueError(f"{name}: must be a number, got {value!r}")
        if value is not None and value < at_least:
            raise ValueError(f"{name}: must be at least {at_least}, got {value}")
        if value is not None and not value > above:
            raise ValueError(f"{name}: must be above {above}, got {value}")


# A mean in single precision depends on its order, so on the number of processes, by less: each
# value is rounded by 6e-8 of itself.
_SAME = 2.5e-7


@dataclasses.dataclass(frozen=True)
class Goal:
    """The aim of a run: a validation metric, its direction and, if known, a target.

    With several validation sets, the metric names one of them: ``val/near/accuracy``. An own loop
    may call its metric as it likes.
    """

    metric: str = "val/loss"
    """The validation metric that decides which checkpoint is the best."""
    mode: Literal["min", "max"] = "min"
    """Whether a lower or a higher value is better."""
    target: float | None = None
    """The value that a search aims at, and that a report compares with; none: unknown."""

    def __post_init__(self) -> None:
        if not self.metric:
            raise ValueError("metric: must be a name such as 'val/loss', got ''")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode: expected 'min' or 'max', got {self.mode!r}")

    def better(self, value: float, than: float | None) -> bool:
        """Return whether `value` is better than `than`, by more than rounding.

        NaN never is, a number beats None.
        """
        if math.isnan(value):
            return False
        if than is None:
            return True
        if math.isclose(value, than, rel_tol=_SAME):
            return False
        return value > than if self.mode == "max" else value < than

    def reached(self, value: float | None) -> bool:
        """Return whether `value` meets the target, but for rounding. False without a target."""
        if value is None or self.target is None:
            return False
        if math.isclose(value, self.target, rel_tol=_SAME):
            return True
        return value >= self.target if self.mode == "max" else value <= self.target


@dataclasses.dataclass(frozen=True)
class Train:
    """How to train. The defaults are what an expert would pick first.

    Settings that one rarely changes are in groups: ``Train(limits=Train.Limits(max_minutes=30))``
    in Python is ``train.limits.max_minutes=30`` on the command line.
    """

    epochs: int | None = 10
    """Passes over the training set; ignored where `steps` is set."""
    steps: int | None = None
    """Optimizer steps in total."""
    batch_size: int = 256
    """Samples per optimizer step, over all ranks."""
    micro_batch: int | None = None
    """Samples per forward on one rank; none: the rank's whole share of the batch."""
    drop_last: bool = True
    """Leave out the rest of an epoch that fills no batch; false: it is a smaller batch."""
    eval_batch: int | None = None
    """Samples per forward on one rank in an evaluation; none: the micro-batch."""
    precision: Precision = "fp32"
    """Number format of the arithmetic: fp32, TF32 multiplications, or mixed with bf16 or fp16."""
    strategy: Literal["single", "dp", "ddp", "zero1", "fsdp", "tp", "pp"] = "ddp"
    """How the processes divide the work; see docs/strategies.md."""
    compile: bool = False
    """Compile the model with `torch.compile`: faster steps after a slow first one."""
    recompute: bool = False
    """Save memory: compute the activations of blocks again during the backward."""
    channels_last: bool = False
    """Store images and convolutions channels last, which is faster on recent GPUs."""
    clip: float | None = None
    """Largest norm of the gradient; none: no clipping."""
    log_gradient_norm: bool = False
    """Log the norm of each step's gradient, before clipping, as `train/gradient_norm`."""
    ema: float | None = None
    """Evaluate, keep and export weights averaged over the steps, with this decay; none: the last.

    0.999 averages about the last 1,000 steps. The first steps use a smaller decay.
    """
    schedule: Literal["constant", "linear", "cosine", "one_cycle", "plateau"] = "constant"
    """The learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps in which the learning rate grows from 0 to its start."""
    seed: int = 0
    """Decides the weights, the order of the data and the augmentation."""
    deterministic: bool = False
    """Refuse operations whose result differs between runs; costs speed."""
    workers: int | None = None
    """Loader processes per rank; none: as many as the cores allow, 0 for tensors in memory."""
    log_every: int | None = None
    """Steps between reports of the speed; none: about one report a second."""
    eval_every: int | None = None
    """Steps between evaluations; none: after each epoch."""
    patience: int | None = None
    """Finish after this many evaluations in a row without a better goal metric; none: never."""
    test: bool = True
    """Evaluate `test()` once, when the run has finished."""

    @dataclasses.dataclass(frozen=True)
    class Checkpoints:
        """Which checkpoints are written, and which are kept."""

        save_every: int | None = None
        """Steps between checkpoints, apart from those of the best evaluations; none: with each
        evaluation; 0: no checkpoints."""
        keep: int = 1
        """Best checkpoints kept, in addition to the last."""

        def __post_init__(self) -> None:
            _require_all(self, ("save_every", "keep"), at_least=0)

    checkpoints: Checkpoints = Checkpoints()

    @dataclasses.dataclass(frozen=True)
    class Limits:
        """When a training ends early, and what happens when the memory of a device is full."""

        max_minutes: float | None = None
        """Finish, with a checkpoint, after this many minutes of an attempt; none: no limit."""
        hang_minutes: float | None = 10.0
        """End the run if a rank makes no progress for so long, and name the rank; none: wait.

        The limit is six times as long for the first step. It is also six times as long, and at
        least half an hour, before the first step (data, model, restoring) and after the last
        (checkpoint).
        """
        stop_at_target: bool = False
        """Finish at the first evaluation that reaches `goal.target`."""
        oom: Literal["halve", "fail"] = "halve"
        """When a device is out of memory: halve the micro-batch of all ranks, or fail."""

        def __post_init__(self) -> None:
            _require_all(self, ("max_minutes", "hang_minutes"), above=0)

    limits: Limits = Limits()

    @dataclasses.dataclass(frozen=True)
    class Plateau:
        """How ``train.schedule=plateau`` reduces the learning rate."""

        factor: float = 0.1
        """The learning rate is multiplied by this number."""
        patience: int = 5
        """After this many evaluations in a row without a better goal metric, and again after each
        further so many."""
        lowest: float = 0.0
        """The learning rate stays at least at this fraction of its start."""

        def __post_init__(self) -> None:
            _require_all(self, ("patience",), at_least=1)
            _require_all(self, ("lowest", "factor"), at_least=0)
            if not 0 < self.factor < 1:
                raise ValueError(f"factor: must be between 0 and 1, got {self.factor}")

    plateau: Plateau = Plateau()

    @dataclasses.dataclass(frozen=True)
    class MLflow:
        """The content for MLflow in addition to metrics, settings and checkpoints."""

        log_model: bool = True
        """Log the best model when a run finishes, for `mlflow.pytorch.load_model`."""
        log_pictures: bool = True
        """Show what the model gets wrong: at the first evaluation, the last, and new bests."""

    mlflow: MLflow = MLflow()

    @dataclasses.dataclass(frozen=True)
    class DDP:
        """How the strategies ddp and zero1 send gradients."""

        compression: Literal["none", "bf16"] = "none"
        """The number format of the gradients on the wire."""
        static_graph: bool = False
        """Promise that every step uses the same parameters in the same order."""
        bucket_mb: float | None = None
        """Megabytes of gradients that are sent at once; none: PyTorch's own choice."""

        def __post_init__(self) -> None:
            _require_all(self, ("bucket_mb",), above=0)

    ddp: DDP = DDP()

    @dataclasses.dataclass(frozen=True)
    class Pipeline:
        """How the strategy pp works."""

        schedule: Literal["1f1b", "gpipe"] = "1f1b"
        """The order of forwards and backwards; 1f1b needs less memory."""

    pp: Pipeline = Pipeline()

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Refuse an old name with the new one. The generated `__init__` knows only new names."""
        for old in settings:
            key = new_name(f"train.{old}")
            group, dot, name = key.removeprefix("train.").partition(".")
            if dot:
                kind = type(getattr(cls, group)).__qualname__
                raise TypeError(f"train.{old} is now {key}: write Train({group}={kind}({name}=…))")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            raise ValueError("epochs: set train.epochs or train.steps")
        _require_all(self, ("epochs", "steps", "batch_size", "micro_batch"), at_least=1)
        _require_all(self, ("eval_batch", "log_every", "eval_every", "patience"), at_least=1)
        _require_all(self, ("warmup_steps", "workers", "seed"), at_least=0)
        _require_all(self, ("clip", "ema"), above=0)
        if self.ema is not None and self.ema >= 1:
            raise ValueError(f"ema: must be below 1, got {self.ema}: use a decay such as 0.999")


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment. Subclass it, add settings as annotated fields, and write the factories.

    Every subclass becomes a frozen dataclass. Each field needs a default, and a type that can be
    written as text. `data`, `model` and `measure` are required; the other methods have defaults.
    """

    train: Train = Train()
    goal: Goal = Goal()
    lr: float = 1e-3
    """The learning rate, at its highest; `train.schedule` scales it."""
    search: ClassVar[Mapping[str, Range]] = {}
    _source: ClassVar[int | None] = None
    """A hash of the class's file, as it was imported."""
    lockstep: ClassVar[bool] = False
    """Whether all ranks evaluate equally many batches of equal size, for a `measure` that talks to
    other ranks. Fewer samples than there are ranks may be left out."""
    turns: ClassVar[Sequence[str]] = ()
    """The order in which several optimizers step, each on a loss of its own. Empty: together."""

    def __init_subclass__(cls) -> None:
        annotations = inspect.get_annotations(cls)
        annotations.pop("search", None)  # A search space is not a setting.
        # A subclass may write ``goal = Goal(…)`` without the base's annotation, and so may a mixin
        # in front of the base. As text, it would be looked up in the subclass's module.
        given = set(vars(cls))
        for base in cls.__mro__[1:]:
            if not dataclasses.is_dataclass(base):
                given.update(vars(base))
                continue
            known: dict[str, Any] = {}
            with contextlib.suppress(NameError):
                known = typing.get_type_hints(base)
            for field in dataclasses.fields(base):
                if field.name in given:
                    annotations.setdefault(field.name, known.get(field.name, field.type))
        cls.__annotations__ = annotations
        # A wrong type is refused when the class is defined, not when a run starts. The first use
        # checks a type that is defined later, or in a function.
        with contextlib.suppress(NameError):
            check_types(cls, f"{cls.__name__}.")
        _require_groups(cls)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        cls.__setattr__ = _refuse_change  # type: ignore[method-assign,assignment]
        for field in dataclasses.fields(cls):
            if (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ):
                raise TypeError(f"{cls.__name__}.{field.name} needs a default value")
        _require_values(cls)
        _check_names(cls)
        cls._source = _source(cls)

    def __post_init__(self) -> None:
        _require_groups(self)
        if not self.goal.metric.startswith("val/"):
            raise ValueError(
                "goal.metric: must be a validation metric such as 'val/loss', "
                f"got {self.goal.metric!r}"
            )

    def data(self) -> tuple[Any, Any]:
        """Return the training and validation data sets, map-style or iterable. On every rank.

        Instead of one validation set, a mapping of names to data sets gives metrics such as
        ``val/near/accuracy``. With None, nothing is evaluated: the last checkpoint is the result.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define data(self) -> (training set, validation set)"
        )

    def test(self) -> Any:
        """Return the test set, a mapping of names to data sets, or None. Called on every rank.

        When the run has finished, it is evaluated once, with the best checkpoint's weights.
        """
        return None

    def model(self) -> Any:
        """Return a new `torch.nn.Module` on the CPU. Called on every rank, under the run's seed."""
        raise NotImplementedError(
            f"{type(self).__name__} must define model(self) -> torch.nn.Module"
        )

    def measure(self, model: Any, batch: Any, *_: Any) -> Mapping[str, Any]:
        """Return {"loss": …} and other metrics, each the mean over the batch.

        Write ``measure(self, model, batch)``, or ``measure(self, model, batch, at)``: a third
        parameter gets a `Progress`, the place in the training.

        A value that is no mean over samples is a `Ratio`, or the arguments for one of `metrics`.

        Called in training and validation. `model` may be wrapped (DDP, compiled), so call it.
        Values are 0-d tensors. Do not call `.item()`: it would wait for the GPU at every step.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define measure(self, model, batch) -> {{'loss': …}}"
        )

    def frozen(self, epoch: int) -> Sequence[str]:
        """Return the names of the modules that are not trained in `epoch`, with all in them.

        Names are those of `torch.nn.Module.named_modules`. Must be a pure function: a resume calls
        it for any epoch. The optimizer gets all parameters from the start.
        """
        return ()

    def helpers(self) -> Mapping[str, Any]:
        """Return {name: module} of modules that are not trained, such as a teacher.

        `measure` gets them as ``at.helpers[name]``. Called on every rank after `model`, under the
        run's seed, and in a resume again. They are moved to the device, and set to evaluation mode
        without gradients. No checkpoint has them.
        """
        return {}

    def metrics(self) -> Mapping[str, Any]:
        """Return {name: object} of metrics that need the whole validation set, such as AUROC.

        An object has ``update(*args)`` and ``compute()``, as those of torchmetrics. `measure`
        returns under its name the tuple of `args`. Training ignores it. ``compute()`` returns a
        number, or {name: number}. Called on every rank, once at the start for the names, and once
        an evaluation, which first calls the objects' ``reset()``, if they have it.

        Objects of torchmetrics add their states over ranks. Any other object gets the tensors of
        all ranks at the end, in the order of the samples, in one `update`.
        """
        return {}

    def derive(self, values: Mapping[str, Any]) -> Mapping[str, float]:
        """Return further metrics, computed from the finished values of one evaluation or step.

        `values` has NumPy numbers by name, without ``val/``, and for a `Ratio` of vectors an array
        of the quotients. They follow IEEE: 0/0 is NaN, and `numpy.exp` does not raise.
        """
        return {}

    def pictures(self, model: Any, batch: Any) -> Mapping[str, Any]:
        """Return {name: image} to show in MLflow. None unless overridden.

        An image is a tensor [c, h, w] or [h, w] (floats from 0 to 1, or integers to 255), an array,
        a PIL image or a matplotlib figure. Other values are scaled. Called with the first
        validation batch of an evaluation, on every rank, because the forward may be a collective.
        Rank 0's images are shown. The model is in evaluation mode, without gradients. Random
        numbers drawn here do not affect the training.

        The training continues after an exception, with a notice. But if the forward is a
        collective (``train.strategy=fsdp`` or ``tp``), an exception on one rank leaves the others
        waiting.
        """
        return {}

    def batches(self, data: Any, epoch: int, generator: Any) -> Sequence[Sequence[int]] | None:
        """Return the batches of an epoch of the training set: a list of indices for each step.

        A list has the samples of all ranks. RankZero divides it evenly among ranks and
        micro-batches. Lists may differ in length. Each epoch must have as many lists as epoch 0.
        None, unless overridden: batches of ``train.batch_size`` in a random order.

        Must be a pure function: every rank calls it, and a resume calls it for any epoch. Draw from
        `generator`, a `torch.Generator` with the seed of the run and the epoch. `rankzero.batches`
        has functions for weights and lengths.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of a list of items. PyTorch's default_collate unless overridden.

        Write ``collate(self, samples, training)`` to know whether the batch is for training. The
        random numbers drawn here depend on the seed, the micro-batch's number and the rank alone.
        """
        from torch.utils.data import default_collate

        return default_collate(samples)

    def tokens(self, batch: Any) -> int:
        """Return the number of tokens in a training batch. Optional: 0 unless overridden.

        From shapes, without a look at values on a GPU, such as ``batch["ids"].numel()``.
        """
        return 0

    def optimizer(self, model: Any) -> Any:
        """Return the `torch.optim.Optimizer`. AdamW at `lr` unless overridden.

        Or {name: optimizer}: all of them step together, and each parameter belongs to one. With
        ``turns = ("discriminator", "generator")``, they step one after the other: each step calls
        `measure` once for each name, as ``at.turn``, and that optimizer steps on its ``loss``.
        """
        from torch import optim

        return optim.AdamW(model.parameters(), lr=self.lr)

    def parallelize(self) -> Mapping[str, Any]:
        """Return {module name: parallel style} for ``train.strategy=tp``.

        Such as ``{"mlp.up": ColwiseParallel()}``, the plan of
        `torch.distributed.tensor.parallel.parallelize_module`.
        """
        return {}

    def split_points(self) -> Sequence[str]:
        """Return the first module of each later stage, by name, for ``train.strategy=pp``."""
        return ()

    def schedule(
        self, step: int, total_steps: int, *_: Any
    ) -> float | Sequence[float] | Mapping[str, float]:
        """Return the factor on the optimizer's learning rates at `step`, which counts from 0.

        Write ``schedule(self, step, total_steps, at)`` to count epochs: ``at.epoch`` of a
        `Progress`.

        One float for all parameter groups, a list with one for each, or {optimizer: float}. Must
        be a pure function: a resume calls it at any step.
        """
        return factor(self.train.schedule, step, total_steps, self.train.warmup_steps)


def _require_groups(owner: Any) -> None:
    """Raise ConfigError if `train` or `goal` of a class or an object is another kind of value."""
    for name, kind, such_as in (
        ("train", Train, "Train(epochs=10)"),
        ("goal", Goal, "Goal('val/accuracy', 'max')"),
    ):
        value = getattr(owner, name)
        if not isinstance(value, (kind, dataclasses.Field)):
            raise ConfigError(f"{name}: must be a {kind.__name__} such as {such_as}, got {value!r}")


def is_outdated(cls: type[Experiment]) -> bool:
    """Return whether a file of the class or of a base was edited since this program imported it."""
    bases = cls.__mro__[: cls.__mro__.index(Experiment)]
    return any(issubclass(one, Experiment) and one._source != _source(one) for one in bases)


def _source(cls: type) -> int | None:
    """Return a hash, for this process, of the file that defines a class; None without a file."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    try:
        return None if file is None else hash(Path(file).read_bytes())
    except OSError:  # As of a module in a ZIP file.
        return None


def _refuse_change(experiment: Experiment, name: str, _: object) -> None:
    mend = f"set {name}=VALUE on the command line"
    if name not in {field.name for field in dataclasses.fields(experiment)}:
        mend = "write a functools.cached_property, which data() and model() may both use"
    raise dataclasses.FrozenInstanceError(f"self.{name} cannot be assigned to: {mend}")


def _require_values(cls: type[Experiment]) -> None:
    """Raise TypeError if a property or a method has a setting's name."""
    for name in (field.name for field in dataclasses.fields(cls)):
        if hasattr(inspect.getattr_static(cls, name, None), "__get__"):
            mend = ", and change it over the steps in schedule()" if name == "lr" else ""
            raise TypeError(
                f"{cls.__name__}.{name}: {name} is a setting, and no property or method: write "
                f"{name} = VALUE{mend}"
            )


def _check_names(cls: type[Experiment]) -> None:
    """Raise TypeError if a setting, or a method of other parameters, has an Experiment's name."""
    own = {field.name for field in dataclasses.fields(Experiment)}
    settings = {field.name for field in dataclasses.fields(cls)} - own
    keys = [name.rstrip("_") for name in (*own, *settings)]
    if doubled := {key for key in keys if keys.count(key) > 1}:
        raise TypeError(f"{cls.__name__} has two settings with the key {min(doubled)}: rename one")
    for name, method in vars(Experiment).items():
        if name.startswith("_") or name in own:
            continue
        found, place = inspect.getattr_static(cls, name), f"{cls.__name__}.{name}: {name}"
        if not inspect.isfunction(method):
            if name in settings:
                raise TypeError(f"{place} is no setting: write {name} = … without a type")
        elif name in settings or not (callable(found) or hasattr(found, "__get__")):
            raise TypeError(
                f"{place} is a method of Experiment: rename the setting to {name}_, which is "
                f"still {name} on the command line"
            )
        # These have several forms, and are checked where they are called.
        elif name not in ("measure", "collate", "schedule") and inspect.isfunction(found):
            expected = inspect.signature(method)
            try:
                inspect.signature(found).bind(*expected.parameters)
            except TypeError:
                words = f"{name}({', '.join(expected.parameters)})"
                raise TypeError(
                    f"{place} is a method of Experiment, called as {words}, but its parameters "
                    f"are {inspect.signature(found)}: rename yours, or take these"
                ) from None

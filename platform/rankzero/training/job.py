"""One training: its fixed parts, and the state that changes with each step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankzero.experiment import Experiment
from rankzero.training.data.order import BatchOrder
from rankzero.training.data.stream import Loader
from rankzero.training.distributed.world import World
from rankzero.training.metrics.mean_check import MeanCheck
from rankzero.training.metrics.straggler import ForwardTimer
from rankzero.training.metrics.work_meter import WorkMeter
from rankzero.training.optimization.averaged_weights import AveragedWeights
from rankzero.training.optimization.frozen import FrozenParts
from rankzero.training.optimization.optimizer_average import OptimizerAverage
from rankzero.training.optimization.precision import Precision
from rankzero.training.sample_images.capture import ImageCapture
from rankzero.training.strategies.base import MicroBatchStep, Strategy
from rankzero.training_position import Progress, bound, takes_progress

_SCHEDULE = "schedule(self, step, total_steps)"


@dataclasses.dataclass
class State:
    """The part of a training that changes, and that a checkpoint stores."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    base_lrs: list[float]
    """Each group's learning rate, which the schedule multiplies."""
    options: list[dict[str, Any]]
    """Each group's other options, as the experiment creates them."""
    average: AveragedWeights | OptimizerAverage | None = None
    """With `train.ema`, or of the optimizer: what is evaluated, and what the best model is."""
    step: int = 0
    best: float | None = None
    evaluation_pending: bool = False
    """Whether a stop interrupted this step's evaluation. It must come before the next step."""
    evaluations_since_best: int = 0
    lr_reductions: list[float] = dataclasses.field(default_factory=list)
    """The factors by which a plateau has reduced `base_lrs`, in order."""

    def reduce_lr(self, factor: float) -> None:
        """Multiply every group's learning rate."""
        self.base_lrs = [lr * factor for lr in self.base_lrs]
        self.lr_reductions.append(factor)

    def weights_to_evaluate(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which the model has the weights that are evaluated. Collective."""
        return contextlib.nullcontext() if self.average is None else self.average.in_model()


@dataclasses.dataclass(frozen=True)
class TrainingContext:
    """The part of a training that does not change."""

    experiment: Experiment
    world: World
    batch_order: BatchOrder
    total_steps: int
    precision: Precision
    strategy: Strategy
    """Has `State`'s model and optimizer, and divides the work among the ranks."""
    train_loader: Loader
    val_loaders: Mapping[str, Loader]
    """By the group of their metrics: ``val``, or ``val/<name>`` for each of several."""
    make_loader: Callable[[Any], Loader]
    """Returns a loader of another data set."""
    forward_timer: ForwardTimer
    frozen_parts: FrozenParts
    beat: Callable[..., None] = lambda *_: None
    """Reports progress to the watchdog: ``Watchdog.beat``."""
    suspended: Callable[[], float] = lambda: 0.0
    """Returns ``Watchdog.suspended_seconds``."""
    expect_slow_step: Callable[[], None] = lambda: None
    """Announces to the watchdog a step that compiles the model and starts data loaders."""
    model_randoms: Tensor | None = None
    """`rng.state` before `model()`, which may draw what no state dict holds."""
    model_tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The model's numbers of parameters."""
    left_out: Sequence[str] = ()
    """The parameters that `optimizer()` left out, which are frozen."""
    image_capture: ImageCapture = dataclasses.field(default_factory=ImageCapture)
    work_meter: WorkMeter = dataclasses.field(default_factory=WorkMeter)
    helpers: Mapping[str, nn.Module] = dataclasses.field(default_factory=dict)
    takes_progress: bool = dataclasses.field(init=False)
    """Whether the experiment's `measure` has a third parameter."""
    schedule_takes_progress: bool = dataclasses.field(init=False)
    mean_check: MeanCheck = dataclasses.field(default_factory=MeanCheck)

    def __post_init__(self) -> None:
        """Look once for what each step needs to know. Raises UserError for a wrong signature."""
        measure, schedule = self.experiment.measure, self.experiment.schedule
        takes = takes_progress(measure), takes_progress(schedule, _SCHEDULE)
        object.__setattr__(self, "takes_progress", takes[0])
        object.__setattr__(self, "schedule_takes_progress", takes[1])

    def epoch(self, step: int) -> int:
        """Return the epoch of the step that follows `step` finished ones."""
        return step // self.batch_order.steps_per_epoch

    def progress(self, step: int, *, training: bool, turn: str | None = None) -> Progress:
        """Return where the training is after `step` optimizer steps."""
        epoch = self.epoch(step if training else max(0, step - 1))
        return Progress(step, self.total_steps, epoch, training, self.helpers, turn)

    def micro_batch_step(
        self, step: int, *, training: bool, turn: str | None = None, accumulation: int = 1
    ) -> MicroBatchStep:
        """Return how a strategy computes the next micro-batch, after `step` optimizer steps."""
        timer = self.forward_timer
        # Ranks are compared by their training: another evaluates more samples, or none.
        measure = timer.next_measure() if training else timer.measure
        if self.takes_progress:
            measure = bound(measure, self.progress(step, training=training, turn=turn))
        return MicroBatchStep(
            measure,
            self.precision.autocast,
            self.precision.scaler,
            accumulation,
            self.batch_order.micro_batch,
        )

"""What one training is: what does not change while it goes on, and what does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rankzero.experiment import Experiment
from rankzero.training.data.loader import BatchLoader
from rankzero.training.data.order import BatchOrder
from rankzero.training.distributed.world import World
from rankzero.training.metrics.straggler import ForwardTimer
from rankzero.training.precision import Precision
from rankzero.training.sample_images.capture import ImageCapture
from rankzero.training.strategies.base import MicroBatchStep, Strategy


@dataclasses.dataclass
class State:
    """What changes during a run, and what a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    base_lrs: list[float]
    options: list[dict[str, Any]]
    """The optimizer's, by group, as the experiment makes it."""
    step: int = 0
    best: float | None = None
    evaluation_pending: bool = False
    """Whether a stop had this step's evaluation left: it comes before the next step."""


@dataclasses.dataclass(frozen=True)
class TrainingContext:
    """What does not change during a run."""

    experiment: Experiment
    world: World
    batch_order: BatchOrder
    total_steps: int
    precision: Precision
    strategy: Strategy
    """Has `State`'s model and optimizer, and divides the work among the ranks."""
    train_loader: BatchLoader
    val_loader: BatchLoader
    forward_timer: ForwardTimer
    beat: Callable[[], None] = lambda: None
    """Says that this rank gets on; see `watchdog`."""
    begin: Callable[[], None] = lambda: None
    """Says that the next step is the first, which compiles and starts data loaders."""
    image_capture: ImageCapture = dataclasses.field(default_factory=ImageCapture)
    """Takes pictures at evaluations."""


def arithmetic(job: TrainingContext) -> MicroBatchStep:
    """Return how a micro-batch is computed."""
    precision = job.precision
    return MicroBatchStep(
        job.forward_timer.timed(job.experiment.measure),
        precision.autocast,
        precision.scaler,
        job.batch_order.accumulation,
    )

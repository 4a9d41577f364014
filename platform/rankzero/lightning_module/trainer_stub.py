"""A `LightningModule`'s `trainer`: the facts that RankZero's loop has."""

from __future__ import annotations

import dataclasses
from typing import Any

from rankzero import ranks
from rankzero.errors import UserError
from rankzero.experiment import Train


@dataclasses.dataclass
class TrainerStub:
    """Has the attributes that modules commonly read. Any other raises a UserError."""

    train: Train
    samples: int
    """In the training set."""
    datamodule: Any = None
    global_step: int = 0
    """Optimizer steps taken. `LightningExperiment.schedule` sets it."""
    training: bool = True

    sanity_checking = False
    logger = None
    loggers: tuple[Any, ...] = ()
    fast_dev_run = False
    progress_bar_callback = None
    accumulate_grad_batches = 1

    @property
    def num_training_batches(self) -> int:
        """Optimizer steps in an epoch."""
        return max(1, self.samples // self.train.batch_size)

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps in total."""
        return self.train.steps or (self.train.epochs or 0) * self.num_training_batches

    @property
    def max_steps(self) -> int:
        return self.estimated_stepping_batches

    @property
    def max_epochs(self) -> int:
        return -(-self.estimated_stepping_batches // self.num_training_batches)

    @property
    def current_epoch(self) -> int:
        return self.global_step // self.num_training_batches

    @property
    def world_size(self) -> int:
        return ranks.detect().world_size

    @property
    def global_rank(self) -> int:
        return ranks.detect().rank

    @property
    def local_rank(self) -> int:
        return ranks.detect().local_rank

    @property
    def is_global_zero(self) -> bool:
        return ranks.detect().first

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for special methods, and must get an AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        raise UserError(
            f"the module reads trainer.{name}, which RankZero's loop does not have: do without it, "
            "or train with Lightning's own Trainer and rankzero.integrations.lightning"
        )

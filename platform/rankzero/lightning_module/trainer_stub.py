"""A `LightningModule`'s `trainer`: the facts that RankZero's loop has."""

from __future__ import annotations

from typing import Any

from rankzero import ranks
from rankzero.errors import UserError
from rankzero.experiment import Train

LIGHTNINGS_OWN = "train with Lightning's own Trainer and rankzero.integrations.lightning"


class TrainerStub:
    """Has the attributes that modules commonly read. Any other raises a UserError.

    `samples`: in the training set.
    """

    # A module may set or compare these. RankZero's loop has nothing behind them.
    sanity_checking = fast_dev_run = False
    logger = progress_bar_callback = None
    loggers: tuple[Any, ...] = ()
    accumulate_grad_batches = 1

    def __init__(self, train: Train, samples: int, datamodule: Any = None) -> None:
        self.datamodule = datamodule
        # The experiment's `measure` sets the steps and the epoch, the module's forward `training`.
        self.global_step, self.current_epoch, self.training = 0, 0, True
        self.num_training_batches = max(1, samples // train.batch_size)
        steps = train.steps or (train.epochs or 0) * self.num_training_batches
        self.estimated_stepping_batches = self.max_steps = steps
        self.max_epochs = -(-steps // self.num_training_batches)
        mine = ranks.detect()
        self.global_rank, self.is_global_zero = mine.rank, mine.first
        self.local_rank, self.world_size = mine.local_rank, mine.world_size

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for special methods, and must get an AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        raise UserError(
            f"the module reads trainer.{name}, which RankZero's loop does not have: do without it, "
            f"or {LIGHTNINGS_OWN}"
        )

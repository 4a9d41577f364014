"""Digits with Lightning on two processes that share the model (FSDP2), tracked.

python experiments/integrations/lightning_sharded_digits.py [epochs] [name]

Each process saves its part of a checkpoint. A second call with the same name continues from the
last one.
"""

import sys
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_digits import LitDigits, data, goal, train
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from rankzero.integrations.lightning import RankZeroCallback, RankZeroLogger


class ShardedDigits(LitDigits):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def main(epochs: int, name: str | None = None, devices: int = 2) -> None:
    training_set, validation_set = data()
    logger = RankZeroLogger("lightning-sharded-digits", goal=goal, name=name, log_checkpoints=True)
    folder = Path("lightning", name or "unnamed").resolve()
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="auto",
        devices=devices,
        strategy=ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1),
        logger=logger,
        callbacks=[RankZeroCallback(logger), ModelCheckpoint(folder, save_last="link")],
        enable_progress_bar=False,
        log_every_n_steps=10,
    )
    resumed = "last" if name is not None else None
    loader = DataLoader(training_set, train.batch_size // devices, shuffle=True, drop_last=True)
    trainer.fit(ShardedDigits(), loader, DataLoader(validation_set, 360), ckpt_path=resumed)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, *sys.argv[2:3])

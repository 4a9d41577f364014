"""Digits with Lightning, tracked.

With Lightning's own Trainer:  python experiments/integrations/lightning_digits.py [epochs]
With RankZero's loop:          rankzero train experiments/integrations/lightning_digits.py
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from rankzero import Goal, Train
from rankzero.integrations.lightning import RankZeroCallback, RankZeroLogger

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, convnet

goal = Goal("val/accuracy", "max", target=0.9)
train = Train(epochs=5, batch_size=64)


def data():
    return Digits().data()


class LitDigits(LightningModule):
    def __init__(self, width: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: nn.Module = convnet(width)

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        self.log("train_loss_reported", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        # The mean over all processes, which share the validation set.
        self.log("val_loss", cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main(epochs: int) -> None:
    training_set, validation_set = data()
    logger = RankZeroLogger("lightning-digits", goal=goal)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="auto",
        devices=1,
        logger=logger,
        callbacks=[RankZeroCallback(logger)],
        enable_progress_bar=False,
        enable_checkpointing=False,
        log_every_n_steps=10,
    )
    loader = DataLoader(training_set, train.batch_size, shuffle=True, drop_last=True)
    trainer.fit(LitDigits(), loader, DataLoader(validation_set, 360))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

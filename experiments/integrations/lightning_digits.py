"""Digits with Lightning, tracked.     python experiments/integrations/lightning_digits.py [epochs]"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from rankzero import Goal
from rankzero.integrations.lightning import RankZeroCallback, RankZeroLogger

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, convnet


class LitDigits(LightningModule):
    def __init__(self, width: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: nn.Module = convnet(width)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("train_loss_reported", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        self.log("val_loss", cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(-1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main(epochs: int) -> None:
    train, val = Digits().data()
    logger = RankZeroLogger("lightning-digits", goal=Goal("val/accuracy", "max", target=0.9))
    trainer = Trainer(
        max_epochs=epochs, accelerator="auto", devices=1, logger=logger, callbacks=[RankZeroCallback(logger)],
        enable_progress_bar=False, enable_checkpointing=False, log_every_n_steps=10,
    )  # fmt: skip
    trainer.fit(LitDigits(), DataLoader(train, 64, shuffle=True, drop_last=True), DataLoader(val, 360))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

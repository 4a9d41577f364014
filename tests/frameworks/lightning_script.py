"""A script that trains a small module with Lightning's adapters, and the events of its run."""

from __future__ import annotations

from pathlib import Path

from frameworks.examples import scripted
from rankzero.events import Evaluated, StepsLogged

LIGHTNING_STEPS = """
import sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from rankzero.integrations.lightning import RankZeroCallback, RankZeroLogger

class Model(BoringModel):
    given = 0
    def training_step(self, batch, batch_idx):
        # 1, 2, 3 … in value, whatever the weights are.
        self.given += 1
        loss = self.layer(batch).sum()
        loss = loss - loss.detach() + self.given
        self.log("train/mine", loss.detach() * 10)
        return self.by_hand(loss)
    def by_hand(self, loss):
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch).sum())

class Two(Model):
    automatic_optimization = False
    def by_hand(self, loss):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss
    def configure_optimizers(self):
        return [torch.optim.SGD([one], lr=0.1) for one in self.layer.parameters()]

def fit(kind, epochs=2, ckpt_path=None, goal=None, logger=None, others=(), **options):
    logger = logger or RankZeroLogger("steps", name="r1", offline=True, goal=goal)
    callbacks = [*others, RankZeroCallback(logger), ModelCheckpoint("saved", save_last=True)]
    return trained(kind, epochs, ckpt_path, logger, callbacks, **options)

def trained(kind, epochs, ckpt_path, logger, callbacks, **options):
    options = {"limit_train_batches": 6, "limit_val_batches": 2, **options}
    trainer = Trainer(max_epochs=epochs, logger=logger, callbacks=callbacks, log_every_n_steps=1,
        enable_progress_bar=False, accelerator="cpu", enable_model_summary=False, **options)
    trainer.fit(kind(), ckpt_path=ckpt_path)
    return trainer
"""


def fitted(folder: Path, *lines: str) -> list[object]:
    """Run lines after those above; return the events of the run."""
    return scripted("lightning", folder, "\n".join([LIGHTNING_STEPS, *lines]))[0]


def points(events: list[object]) -> dict[str, dict[int, float]]:
    """Return the values of each metric by step, those of evaluations too."""
    found: dict[str, dict[int, float]] = {}
    for event in events:
        if isinstance(event, StepsLogged):
            for name, values in event.metrics.items():
                found.setdefault(name, {}).update(zip(event.steps, values, strict=True))
        elif isinstance(event, Evaluated):
            for name, value in event.metrics.items():
                found.setdefault(name, {})[event.step] = value
    return found

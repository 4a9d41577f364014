"""Digits with Composer, tracked by a logger of its own.

composer -n 2 experiments/integrations/composer_digits.py [epochs]
"""

import sys
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerClassifier
from composer.utils import dist
from torch.utils.data import DataLoader

import rankzero
from rankzero import Goal

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, convnet

BATCH_SIZE = 64


class RankZeroLogger(LoggerDestination):
    """Composer calls it on every rank. `options`: those of `rankzero.track`."""

    def __init__(self, experiment: str, **options: Any) -> None:
        self.run = rankzero.track(experiment, **options)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.run.log_params(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        measured = {
            name.replace("metrics/eval/", "val/"): value
            for name, value in metrics.items()
            if name.startswith("metrics/eval/")
        }
        if measured:
            self.run.evaluated(measured, step)
        # Composer counts a batch after it has logged the loss.
        if "loss/train/total" in metrics:
            self.run.log({"train/loss": metrics["loss/train/total"]}, step + 1)

    def fit_end(self, state: State, logger: Logger) -> None:
        # After an exception, the end of the process ends the run.
        self.run.finish()


def main(epochs: int) -> None:
    dist.initialize_dist("cpu")
    size = BATCH_SIZE // dist.get_world_size()
    train, val = Digits().data()
    train_loader, val_loader = (
        DataLoader(data, size, sampler=dist.get_sampler(data, shuffle=shuffle), drop_last=shuffle)
        for data, shuffle in ((train, True), (val, False))
    )
    model = ComposerClassifier(convnet(16), num_classes=10)
    config = {"batch_size": BATCH_SIZE, "lr": 3e-3}
    goal = Goal("val/MulticlassAccuracy", "max", target=0.9)
    Trainer(
        model=model,
        train_dataloader=train_loader,
        eval_dataloader=val_loader,
        max_duration=epochs,
        optimizers=torch.optim.AdamW(model.parameters(), lr=config["lr"]),
        device="cpu",
        loggers=RankZeroLogger("composer-digits", config=config, goal=goal),
        progress_bar=False,
    ).fit()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

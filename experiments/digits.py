"""Handwritten digits with a small convnet: 99 % accuracy in seconds.

rankzero train experiments/digits.py lr=3e-3
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from rankzero import Choice, Experiment, Goal, Train

VALIDATION_SAMPLES = 360


def load() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1797 digits: images [1797, 1, 8, 8] from 0 to 1, labels [1797]."""
    # Importing scikit-learn would take seconds in every process, so this reads its data file.
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None, "pip install scikit-learn"
    table = np.loadtxt(
        Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",", dtype=np.float32
    )
    return torch.from_numpy(table[:, :-1]).view(-1, 1, 8, 8) / 16, torch.from_numpy(
        table[:, -1]
    ).long()


def convnet(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(2 * width * 4 * 4, 10),
    )


class Digits(Experiment):
    train: Train = Train(epochs=20, batch_size=64, schedule="one_cycle")
    lr: float = 3e-3
    width: int = 32
    goal = Goal("val/accuracy", "max", target=0.97)
    search = {"width": Choice(16, 32, 64)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        images, labels = load()
        # The split has its own seed: every run validates on the same digits.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, val = order[VALIDATION_SAMPLES:], order[:VALIDATION_SAMPLES]
        return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])

    def model(self) -> nn.Module:
        return convnet(self.width)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}

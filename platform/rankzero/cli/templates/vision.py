"""Classifies 1,797 small images of handwritten digits. It trains in seconds, also without a GPU.

rankzero train vision.py lr=0.01 train.epochs=5
rankzero config vision.py          # every setting
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from rankzero import Choice, Experiment, Goal, Train


class Vision(Experiment):
    # Each field is a setting: a key on the command line, and a column in MLflow.
    train: Train = Train(epochs=10, batch_size=64, schedule="one_cycle")
    lr: float = 3e-3
    width: int = 32
    # The checkpoint with the best value is kept as the best. `rankzero search` aims at the target.
    goal = Goal("val/accuracy", "max", target=0.97)
    search = {"width": Choice(16, 32, 64)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        """Return the training and the validation set: any data sets, map-style or iterable."""
        found = load_digits()
        images = torch.from_numpy(found.images).float()[:, None] / 16  # [1797, 1, 8, 8], 0 to 1
        labels = torch.from_numpy(found.target).long()
        # A seed of its own: every run validates on the same images.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, val = order[360:], order[:360]
        return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])

    def model(self) -> nn.Module:
        """Return the model on the CPU. The weights follow from train.seed."""
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.BatchNorm2d(self.width),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * self.width * 4 * 4, 10),
        )

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the loss of a batch and other means, for training and for validation."""
        images, labels = batch
        logits = model(images)
        # No .item() here: every step would wait for the GPU.
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}

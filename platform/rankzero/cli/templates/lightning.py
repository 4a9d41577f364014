"""Classifies 1,797 small images of handwritten digits with a LightningModule. It trains in seconds.

pip install 'rankzero[lightning]'
rankzero train lightning.py lr=0.01 train.epochs=5
rankzero config lightning.py          # every setting
"""

import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from rankzero import Choice, Goal, Train

train = Train(epochs=10, batch_size=64, schedule="one_cycle")
# The checkpoint with the best value is kept as the best. `rankzero search` aims at the target.
goal = Goal("val/accuracy", "max", target=0.97)
search = {"width": Choice(16, 32, 64)}


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the validation set. A LightningDataModule can do it, too."""
    found = load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 16  # [1797, 1, 8, 8], 0 to 1
    labels = torch.from_numpy(found.target).long()
    # A seed of its own: every run validates on the same images.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


class Lightning(LightningModule):
    # Each argument is a setting: a key on the command line, and a column in MLflow.
    def __init__(self, width: int = 32, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * 4 * 4, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log means over the validation set, as val/loss and val/accuracy."""
        images, labels = batch
        logits = self.net(images)
        self.log("val_loss", cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(-1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

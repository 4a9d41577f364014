"""Predicts from a table of 30 measured values whether a tumour is benign. It trains in seconds.

rankzero train tabular.py lr=0.01 train.epochs=5
rankzero config tabular.py          # every setting
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from rankzero import Choice, Experiment, Goal, Train


class Tabular(Experiment):
    # Each field is a setting: a key on the command line, and a column in MLflow.
    train: Train = Train(epochs=20, batch_size=32, schedule="cosine")
    lr: float = 3e-3
    width: int = 32
    dropout: float = 0.2
    # The checkpoint with the best value is kept as the best. `rankzero search` aims at the target.
    goal = Goal("val/accuracy", "max", target=0.96)
    search = {"width": Choice(16, 32, 64)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        """Return the training and the validation set: any data sets, map-style or iterable."""
        table, labels = map(torch.from_numpy, load_breast_cancer(return_X_y=True))
        # A seed of its own: every run validates on the same rows.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, val = order[169:], order[:169]
        # The training set alone decides the scale: the validation set would leak.
        table = ((table - table[train].mean(0)) / table[train].std(0)).float()
        return TensorDataset(table[train], labels[train]), TensorDataset(table[val], labels[val])

    def model(self) -> nn.Module:
        """Return the model on the CPU. The weights follow from train.seed."""
        return nn.Sequential(
            nn.Linear(30, self.width), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(self.width, 2)
        )

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the loss of a batch and other means, for training and for validation."""
        rows, labels = batch
        logits = model(rows)
        # No .item() here: every step would wait for the GPU.
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}

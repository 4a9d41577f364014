"""A table: is a tumour benign? The result is the AUROC, which needs all samples at once.

rankzero train experiments/tabular.py
"""

from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from rankzero import Choice, Experiment, Goal, Train

VALIDATION_SAMPLES = 169


class Auroc:
    """The area under the ROC curve. `torchmetrics.AUROC("binary")` would do as well."""

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.value = roc_auc_score(labels.cpu(), scores.cpu())

    def compute(self) -> float:
        return float(self.value)


class Tumours(Experiment):
    train: Train = Train(epochs=20, batch_size=32, schedule="cosine")
    lr: float = 3e-3
    width: int = 32
    dropout: float = 0.2
    goal = Goal("val/auroc", "max", target=0.98)
    search = {"width": Choice(16, 32, 64)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        """Return 569 tumours with 30 measured values each, standardised."""
        table, labels = map(torch.from_numpy, load_breast_cancer(return_X_y=True))
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, val = order[VALIDATION_SAMPLES:], order[:VALIDATION_SAMPLES]
        # The training set alone decides the scale: the validation set would leak.
        table = ((table - table[train].mean(0)) / table[train].std(0)).float()
        return TensorDataset(table[train], labels[train]), TensorDataset(table[val], labels[val])

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(30, self.width), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(self.width, 1)
        )

    def metrics(self) -> dict[str, Any]:
        return {"auroc": Auroc()}

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        table, labels = batch
        scores = model(table).squeeze(-1)
        return {
            "loss": binary_cross_entropy_with_logits(scores, labels.float()),
            "auroc": (scores, labels),
        }

"""Fine-tuning: a network that knows the digits 0 to 4 learns 5 to 9 from 100 images.

rankzero train experiments/finetune.py
rankzero train experiments/finetune.py frozen_epochs=0      # train the backbone from the start
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from digits import convnet, load
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from rankzero import Choice, Experiment, Goal, Train


def digits(first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return the digits from `first` to `last`: images [n, 1, 8, 8], labels that begin at 0."""
    images, labels = load()
    chosen = (labels >= first) & (labels <= last)
    return images[chosen], labels[chosen] - first


def pretrained(epochs: int) -> nn.Module:
    """Return the layers before the head of a network that was trained on the digits 0 to 4.

    With a network to download, this is ``torchvision.models.resnet18(weights="DEFAULT")``.
    """
    model = convnet(width=16)
    images, labels = digits(0, 4)
    optimizer = optim.AdamW(model.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model[:-1]


class Finetune(Experiment):
    train: Train = Train(epochs=20, batch_size=20)
    lr: float = 3e-3
    frozen_epochs: int = 10
    pretrain_epochs: int = 5
    goal = Goal("val/accuracy", "max", target=0.88)
    search = {"frozen_epochs": Choice(0, 10, 20)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        images, labels = digits(5, 9)
        return TensorDataset(images[:100], labels[:100]), TensorDataset(images[100:], labels[100:])

    def model(self) -> nn.Module:
        """Put a new head on a trained backbone. Every rank does the same, under the run's seed."""
        return nn.Sequential(
            OrderedDict(backbone=pretrained(self.pretrain_epochs), head=nn.Linear(512, 5))
        )

    def frozen(self, epoch: int) -> Sequence[str]:
        """Train the new head alone at first: its large gradients would spoil the backbone."""
        return ["backbone"] if epoch < self.frozen_epochs else []

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        backbone = {"params": model.backbone.parameters(), "lr": self.lr / 10, "name": "backbone"}
        return optim.AdamW([{"params": model.head.parameters()}, backbone], self.lr)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}

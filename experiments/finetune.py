"""Fine-tuning: a ResNet-18 that knows the digits 0 to 4 learns 5 to 9 from 100 images.

rankzero train experiments/finetune.py
rankzero train experiments/finetune.py frozen_epochs=0      # train the backbone from the start
rankzero train experiments/finetune.py weights=DEFAULT      # torchvision downloads ImageNet's
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from digits import load
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.data import TensorDataset
from torchvision.models import resnet18
from torchvision.transforms.functional import normalize

from rankzero import Choice, Experiment, Goal, Train


def digits(first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return the digits from `first` to `last`: images [n, 3, 32, 32], labels that begin at 0."""
    images, labels = load()
    chosen = (labels >= first) & (labels <= last)
    # A ResNet takes colours, and divides the height and the width by 32.
    large = interpolate(images[chosen], size=32, mode="bilinear")
    return large.expand(-1, 3, -1, -1), labels[chosen] - first


def resnet(weights: str | None, pretrain_epochs: int) -> nn.Module:
    """Return a trained ResNet-18: with torchvision's weights, or trained on the digits 0 to 4."""
    model = resnet18(weights=weights)
    if weights is not None:
        return model
    images, labels = digits(0, 4)
    optimizer = optim.AdamW(model.parameters(), 1e-3)
    for _ in range(pretrain_epochs):
        for batch in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model


class Finetune(Experiment):
    train: Train = Train(epochs=25, batch_size=24)
    lr: float = 3e-3
    frozen_epochs: int = 10
    weights: str | None = None
    pretrain_epochs: int = 2
    goal = Goal("val/accuracy", "max", target=0.85)
    search = {"frozen_epochs": Choice(0, 10, 20)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        images, labels = digits(5, 9)
        if self.weights is not None:
            # Each colour as the backbone has seen it: with ImageNet's mean and spread.
            images = normalize(images, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        return TensorDataset(images[:100], labels[:100]), TensorDataset(images[100:], labels[100:])

    def model(self) -> nn.Module:
        """Put a new head on a trained backbone. Every rank does the same, under the run's seed."""
        backbone = resnet(self.weights, self.pretrain_epochs)
        head = nn.Linear(backbone.fc.in_features, 5)
        backbone.fc = nn.Identity()
        return nn.Sequential(OrderedDict(backbone=backbone, head=head))

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

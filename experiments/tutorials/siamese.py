"""A Siamese network: do two images show the same digit?

From pytorch/examples, siamese_network/main.py (77f55b9, 2025-08-25, BSD-3-Clause), in own words.
Data: scikit-learn's digits instead of MNIST.

rankzero train experiments/tutorials/siamese.py
"""

import random

import torch
from digit_images import digits
from torch import Tensor, nn, optim
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import Dataset, TensorDataset
from torchvision.models import resnet18

from rankzero import Experiment, Goal, Progress, Train

Pair = tuple[Tensor, Tensor, Tensor]


class Pairs(Dataset[Pair]):
    """Random pairs of images: of one digit at even places, of two digits at odd ones."""

    def __init__(self, data: TensorDataset) -> None:
        self.images, labels = data.tensors
        self.rows = [(labels == digit).nonzero().flatten().tolist() for digit in range(10)]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Pair:
        same = index % 2 == 0
        one, other = random.sample(range(10), 2)
        if same:
            first, second = random.sample(self.rows[one], 2)
        else:
            first, second = random.choice(self.rows[one]), random.choice(self.rows[other])
        return self.images[first], self.images[second], torch.tensor(float(same))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = resnet18()
        self.features.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
        self.features.fc = nn.Identity()
        self.head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 1))
        for layer in self.head[0], self.head[2]:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.constant_(layer.bias, 0.01)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        both = torch.cat([self.features(first), self.features(second)], 1)
        return self.head(both).squeeze(1)


class SameDigit(Experiment):
    train: Train = Train(epochs=14, batch_size=64, eval_batch=360, seed=1)
    lr: float = 1.0
    gamma: float = 0.7
    goal = Goal("val/accuracy", "max")

    def data(self) -> tuple[Pairs, Pairs]:
        train, val = digits()
        return Pairs(train), Pairs(val)

    def model(self) -> nn.Module:
        return Siamese()

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.Adadelta(model.parameters(), self.lr)

    def schedule(self, step: int, total_steps: int, at: Progress) -> float:
        return self.gamma**at.epoch

    def measure(self, model: nn.Module, batch: Pair) -> dict[str, Tensor]:
        first, second, same = batch
        logits = model(first, second)
        accuracy = ((logits > 0) == same.bool()).float().mean()
        return {"loss": binary_cross_entropy_with_logits(logits, same), "accuracy": accuracy}

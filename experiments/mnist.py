"""MNIST with the classic 784-128-10 MLP.

rankzero train experiments/mnist.py
rankzero train experiments/mnist.py data=fake      # noise instead of a download, for speed work
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchvision.datasets import MNIST
from vision_data import downloaded

from rankzero import Choice, Experiment, Goal, Train

# Mean and standard deviation of the pixels of the training set.
MEAN, SPREAD = 0.1307, 0.3081


def load(split: Literal["train", "val"]) -> TensorDataset:
    """Return MNIST in memory: standardised pixels [n, 784], labels [n]."""
    digits = downloaded(MNIST, train=split == "train")
    pixels = digits.data.flatten(1).float().div(255).sub(MEAN).div(SPREAD)
    return TensorDataset(pixels, digits.targets)


def fake(samples: int) -> TensorDataset:
    """Return noise with MNIST's shapes: as fast to train on as MNIST, with nothing to learn."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(samples, 784, generator=generator)
    return TensorDataset(pixels, torch.randint(10, (samples,), generator=generator))


class Mnist(Experiment):
    train: Train = Train(epochs=5, batch_size=256, schedule="one_cycle")
    lr: float = 3e-3
    hidden: int = 128
    data_: Literal["real", "fake"] = "real"
    fake_samples: int = 12_800
    goal = Goal("val/accuracy", "max", target=0.97)
    search = {"hidden": Choice(64, 128, 256)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        if self.data_ == "fake":
            return fake(self.fake_samples), fake(self.fake_samples // 8)
        return load("train"), load("val")

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(784, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        pixels, labels = batch
        logits = model(pixels)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}

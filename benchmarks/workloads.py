"""Experiments of the benchmarks: the same data, model and order, tracked and bare."""

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from rankzero import Experiment, Goal, Train


def noise(samples: int, *shape: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, *shape, generator=generator),
        torch.randint(10, (samples,), generator=generator),
    )


class Workload(Experiment):
    lr: float = 0.01
    goal = Goal("val/loss", "min")

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), self.lr, momentum=0.9, fused=True)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": cross_entropy(model(x), y)}


class Mlp(Workload):
    """An MLP of 64-128-10 at a global batch of 64. A step is nearly all overhead."""

    train: Train = Train(batch_size=64)

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return noise(6400, 64), noise(64, 64)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Convnet(Workload):
    """A small convnet on 32x32 images, with about 15 ms of arithmetic a step."""

    train: Train = Train(batch_size=64)

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return noise(1280, 3, 32, 32), noise(64, 3, 32, 32)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 10),
        )


class Wide(Convnet):
    """A convnet that is bound by arithmetic, with about 100 ms a step on one core."""

    train: Train = Train(batch_size=128)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )

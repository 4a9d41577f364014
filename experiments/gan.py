"""A GAN in two dimensions: a generator learns to draw points from eight spots on a circle.

rankzero train experiments/gan.py
"""

import math
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from rankzero import Choice, Experiment, Goal, Progress, Train

SPOTS, SPREAD, NOISE = 8, 0.1, 8


def points(count: int, seed: int) -> TensorDataset:
    """Return real points [count, 2], and the noise [count, NOISE] to generate as many from."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.randint(SPOTS, (count,), generator=generator) * (2 * math.pi / SPOTS)
    spots = torch.stack([angles.cos(), angles.sin()], 1)
    real = spots + SPREAD * torch.randn(count, 2, generator=generator)
    return TensorDataset(real, torch.randn(count, NOISE, generator=generator))


def network(inputs: int, width: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


class Distance:
    """The energy distance of two sets of points: 0 if both have the same distribution.

    Székely and Rizzo, 2013: 2 E|x - y| - E|x - x'| - E|y - y'|.
    """

    def update(self, fake: Tensor, real: Tensor) -> None:
        def mean(one: Tensor, other: Tensor) -> Tensor:
            return torch.cdist(one, other).mean()

        self.value = 2 * mean(fake, real) - mean(fake, fake) - mean(real, real)

    def compute(self) -> float:
        return float(self.value)


class Gan(Experiment):
    # MLflow can only log a model that `measure` calls as a whole.
    train: Train = Train(epochs=30, batch_size=128, mlflow=Train.MLflow(log_model=False))
    lr: float = 1e-3
    width: int = 64
    samples: int = 4096
    turns = ("discriminator", "generator")
    goal = Goal("val/distance", "min", target=0.02)
    search = {"width": Choice(32, 64, 128)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return points(self.samples, seed=1), points(1024, seed=2)

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "discriminator": network(2, self.width, 1),
                "generator": network(NOISE, self.width, 2),
            }
        )

    def optimizer(self, model: nn.ModuleDict) -> dict[str, optim.Optimizer]:
        return {
            name: optim.Adam(part.parameters(), self.lr, betas=(0.5, 0.99))
            for name, part in model.items()
        }

    def metrics(self) -> dict[str, Any]:
        return {"distance": Distance()}

    def measure(self, model: Any, batch: tuple[Tensor, Tensor], at: Progress) -> dict[str, Any]:
        real, noise = batch
        fake = model["generator"](torch.randn_like(noise) if at.training else noise)
        judge = model["discriminator"]
        # softplus(-score) is the loss of a score whose right answer is "real".
        if at.turn == "discriminator":
            return {"loss": (softplus(-judge(real)) + softplus(judge(fake.detach()))).mean()}
        return {"loss": softplus(-judge(fake)).mean(), "distance": (fake, real)}

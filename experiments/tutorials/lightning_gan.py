"""A GAN with two networks of linear layers, from an example of Lightning.

From Lightning-AI/pytorch-lightning, examples/pytorch/domain_templates/
generative_adversarial_net.py (7f0c343, 2026-07-20, Apache-2.0), in own words.
Data: scikit-learn's digits instead of MNIST.

rankzero train experiments/tutorials/lightning_gan.py
"""

from collections.abc import Sequence
from typing import Any

import torch
from digit_images import digits
from torch import Tensor, nn, optim
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset, default_collate
from torchvision.utils import make_grid

from rankzero import Experiment, Progress, Train


def generator(noise: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(noise, 128), nn.LeakyReLU(0.2)]
    for width in (128, 256, 512):
        # The original's second argument of BatchNorm1d is 0.8, which is `eps`.
        layers += [nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width, eps=0.8)]
        layers += [nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(1024, 784), nn.Tanh(), nn.Unflatten(1, (1, 28, 28)))


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512),
        nn.LeakyReLU(0.2),
        nn.Linear(512, 256),
        nn.LeakyReLU(0.2),
        nn.Linear(256, 1),
    )


def judged(scores: Tensor, real: bool) -> Tensor:
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


class LightningGan(Experiment):
    # MLflow can only log a model that `measure` calls as a whole.
    train: Train = Train(epochs=20, batch_size=64, mlflow=Train.MLflow(log_model=False))
    lr: float = 2e-4
    betas: tuple[float, float] = (0.5, 0.999)
    noise: int = 100
    turns = ("generator", "discriminator")

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return digits()

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Add the noise to the batch, so that both turns have the same."""
        images, _ = default_collate(samples)
        return 2 * images - 1, torch.randn(len(images), self.noise)

    def model(self) -> nn.Module:
        return nn.ModuleDict({"generator": generator(self.noise), "discriminator": discriminator()})

    def optimizer(self, model: nn.ModuleDict) -> dict[str, optim.Optimizer]:
        return {
            name: optim.Adam(part.parameters(), self.lr, self.betas) for name, part in model.items()
        }

    def measure(self, model: Any, batch: tuple[Tensor, Tensor], at: Progress) -> dict[str, Tensor]:
        real, noise = batch
        fake, judge = model["generator"](noise), model["discriminator"]
        if at.turn == "generator":
            return {"loss": judged(judge(fake), True)}
        return {"loss": (judged(judge(real), True) + judged(judge(fake.detach()), False)) / 2}

    def pictures(self, model: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"generated": make_grid((model["generator"](batch[1][:8]) + 1) / 2)}

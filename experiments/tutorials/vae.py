"""A variational autoencoder that draws handwritten digits.

From pytorch/examples, vae/main.py (77f55b9, 2025-08-25, BSD-3-Clause), in own words.
Data: scikit-learn's digits instead of MNIST.

rankzero train experiments/tutorials/vae.py
"""

from typing import Any

import torch
from digit_images import digits
from torch import Tensor, nn, optim
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset
from torchvision.utils import make_grid

from rankzero import Experiment, Goal, Train


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(784, 400), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(400, 20), nn.Linear(400, 20)
        self.decode = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.hidden(images)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        spread = torch.exp(0.5 * log_variance)
        return self.decode(mean + torch.randn_like(spread) * spread), mean, log_variance


class Vae(Experiment):
    train: Train = Train(epochs=10, batch_size=128, seed=1)
    goal = Goal("val/loss", "min")

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return digits()

    def model(self) -> nn.Module:
        return Autoencoder()

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        # The original's loss is the sum over the batch. This `eps` makes the steps on the mean
        # those on the sum.
        return optim.Adam(model.parameters(), self.lr, eps=1e-8 / self.train.batch_size)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, _ = batch
        logits, mean, log_variance = model(images)
        pixels = images.flatten(1)
        difference = binary_cross_entropy_with_logits(logits, pixels, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return {"loss": (difference + divergence) / len(images)}

    def pictures(self, model: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images = batch[0][:8]
        copies = model(images)[0].sigmoid().view_as(images)
        drawn = model.decode(torch.randn(64, 20, device=images.device)).sigmoid()
        pair = make_grid(torch.cat([images, copies]), nrow=8)
        return {"reconstruction": pair, "samples": make_grid(drawn.view(-1, 1, 28, 28))}

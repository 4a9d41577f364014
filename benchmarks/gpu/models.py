"""Experiments of the size that a GPU is bought for: ResNet-18 on CIFAR's shapes, a GPT of 124 M.

And a multilayer perceptron, whose step is all launches.

With ``RANKZERO_SMALL=1`` both are tiny, to try the scripts on a CPU. The data are random: only the
speed is of interest. With ``RANKZERO_GATE=FOLDER`` a run waits for the file ``FOLDER/open``: many
runs start side by side, and train one after the other.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import TensorDataset

from rankzero import Experiment, Goal, Train

SMALL = os.environ.get("RANKZERO_SMALL") == "1"
GATE = os.environ.get("RANKZERO_GATE")


def wait_for_turn() -> None:
    """Wait until the gate is open. Before, nothing of this run is on the GPU."""
    if GATE is not None:
        (Path(GATE) / "ready").touch()
        while not (Path(GATE) / "open").exists():
            time.sleep(0.02)


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.short = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(inner)) + self.short(x))


class ResNet18(Experiment):
    """ResNet-18 with the stem for images of 32x32."""

    train: Train = Train(batch_size=8 if SMALL else 1024)
    lr: float = 0.02
    width: int = 4 if SMALL else 64
    goal = Goal("val/loss", "min")

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        wait_for_turn()

        def noise(samples: int) -> TensorDataset:
            return TensorDataset(
                torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,), dtype=torch.long)
            )

        return noise(self.train.batch_size * 20), noise(self.train.batch_size)

    def model(self) -> nn.Module:
        widths = [self.width * factor for factor in (1, 1, 2, 4, 8)]
        stages = [
            layer
            for number, (before, after) in enumerate(itertools.pairwise(widths))
            for layer in (Block(before, after, 1 if number == 0 else 2), Block(after, after, 1))
        ]
        return nn.Sequential(
            nn.Conv2d(3, self.width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(self.width),
            nn.ReLU(),
            *stages,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(widths[-1], 10),
        )

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), self.lr, momentum=0.9, fused=True)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": cross_entropy(model(x), y)}


class Layer(nn.Module):
    """One layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.mix(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        inner: Tensor = self.mlp(self.norms[1](x))
        return x + inner


class Transformer(nn.Module):
    """GPT-2 without dropout; the embedding is also the head."""

    def __init__(self, words: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        inner = self.layers(self.words(x) + self.places(places))
        return nn.functional.linear(self.norm(inner), self.words.weight)


class Gpt(Experiment):
    """GPT-2 small: 124 million parameters, 1,024 tokens."""

    train: Train = Train(batch_size=2 if SMALL else 16)
    lr: float = 3e-4
    length: int = 32 if SMALL else 1024
    goal = Goal("val/loss", "min")

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        wait_for_turn()
        words = 64 if SMALL else 50304
        train, val = (
            torch.randint(words, (self.train.batch_size * count, self.length + 1))
            for count in (20, 1)
        )
        return TensorDataset(train), TensorDataset(val)

    def model(self) -> nn.Module:
        size = (64, self.length, 2, 32, 2) if SMALL else (50304, self.length, 12, 768, 12)
        return Transformer(*size)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.AdamW(model.parameters(), self.lr, fused=True)

    def tokens(self, batch: tuple[Tensor]) -> int:
        return batch[0].shape[0] * (batch[0].shape[1] - 1)

    def measure(self, model: nn.Module, batch: tuple[Tensor]) -> dict[str, Tensor]:
        (text,) = batch
        found = model(text[:, :-1])
        return {"loss": cross_entropy(found.flatten(0, 1), text[:, 1:].flatten())}


class Mlp(Experiment):
    """A step of a few small kernels: the host is the limit, and each of its microseconds counts."""

    train: Train = Train(batch_size=256)
    lr: float = 0.01
    goal = Goal("val/loss", "min")

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        wait_for_turn()

        def noise(samples: int) -> TensorDataset:
            return TensorDataset(
                torch.randn(samples, 64), torch.randint(10, (samples,), dtype=torch.long)
            )

        return noise(self.train.batch_size * 100), noise(self.train.batch_size)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), self.lr, momentum=0.9, fused=True)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": cross_entropy(model(x), y)}


class MlpGraphs(Mlp):
    """The same, compiled by the experiment itself into CUDA graphs."""

    def model(self) -> nn.Module:
        model = super().model()
        model.compile(mode="reduce-overhead")
        return model


class GptMedium(Gpt):
    """GPT-2 medium: 355 million parameters, 4.3 GB with the state of AdamW."""

    def model(self) -> nn.Module:
        size = (64, self.length, 2, 32, 2) if SMALL else (50304, self.length, 24, 1024, 16)
        return Transformer(*size)

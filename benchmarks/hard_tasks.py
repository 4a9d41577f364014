"""Small tasks: rows of numbers, letters and paragraphs, for exhaustive tables, and shapes.

Each takes a second to train, and shapes about ten. Few of its configurations are near the best
one: batch size, learning rate and width depend on each other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Generator, Tensor, nn, optim
from torch.nn.functional import cross_entropy, mse_loss, pad
from torch.utils.data import Dataset, TensorDataset

from rankzero import Choice, Experiment, Goal, Train

CHAPTERS = ("compound", "debugger", "formatstrings", "specialnames", "string-methods", "types")
VOCABULARY = 2000


class Task(Experiment):
    """What the tasks share: AdamW, and a learning rate that many would begin with."""

    lr: float = 1e-3
    width: int = 32
    search: ClassVar = {"width": Choice(16, 32, 64)}

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.AdamW(model.parameters(), self.lr)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        inputs, labels = batch
        return {"loss": cross_entropy(model(inputs), labels)}


def divided(inputs: Tensor, labels: Tensor, train: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the first samples for training, and the others for validation."""
    return (
        TensorDataset(inputs[:train], labels[:train]),
        TensorDataset(inputs[train:], labels[train:]),
    )


class Rows(Task):
    """A table of 16 numbers a row, and a value that depends on six of them."""

    train: Train = Train(batch_size=32, epochs=24)
    goal: Goal = Goal("val/loss", "min", target=0.22)

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        drawn = Generator().manual_seed(0)
        x = torch.randn(3000, 16, generator=drawn)
        y = (2 * x[:, 0]).sin() * x[:, 1] + (x[:, 2] > 0) * x[:, 3] + 0.5 * x[:, 4] * x[:, 5]
        noise = 0.2 * torch.randn(len(y), generator=drawn)
        return divided(x, (y - y.mean()) / y.std() + noise, 2400)

    def model(self) -> nn.Module:
        width = self.width
        layers = [nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, 1), nn.Flatten(0))

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        inputs, values = batch
        return {"loss": mse_loss(model(inputs), values)}


class Knobs(Rows):
    """The same rows, with six settings to search: also depth, dropout and weight decay."""

    width: int = 32
    depth: int = 2
    dropout: float = 0.1
    decay: float = 0.1
    search: ClassVar = {
        "width": Choice(16, 32, 64),
        "depth": Choice(1, 2),
        "dropout": Choice(0.0, 0.1),
        "decay": Choice(0.0, 0.1),
    }

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.AdamW(model.parameters(), self.lr, weight_decay=self.decay)

    def model(self) -> nn.Module:
        sizes = [16, *[self.width] * self.depth]
        layers = [
            layer
            for before, after in itertools.pairwise(sizes)
            for layer in (nn.Linear(before, after), nn.ReLU(), nn.Dropout(self.dropout))
        ]
        return nn.Sequential(*layers, nn.Linear(self.width, 1), nn.Flatten(0))


class Letters(Task):
    """The next letter of Python's language reference, from the twelve before it."""

    train: Train = Train(batch_size=32, epochs=10)
    width: int = 64
    goal: Goal = Goal("val/loss", "min", target=2.7)
    search: ClassVar = {"width": Choice(32, 64, 128)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        text = "".join(topics[name] for name in CHAPTERS).encode("ascii", "replace")
        letters = torch.tensor(list(text))
        order = torch.randperm(len(letters) - 12, generator=Generator().manual_seed(0))[:7000]
        windows = letters.unfold(0, 13, 1)[order]
        return divided(windows[:, :-1], windows[:, -1], 6000)

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Embedding(128, 8), nn.Flatten()),
            *(nn.Linear(12 * 8, self.width), nn.ReLU(), nn.Linear(self.width, 128)),
        )


class Chapters(Task):
    """The chapter that a paragraph of any length is from, by its words."""

    train: Train = Train(batch_size=32, epochs=20)
    goal: Goal = Goal("val/loss", "min", target=1.05)

    def data(self) -> tuple[Any, Any]:
        """Return (words, chapter) of paragraphs. A word is a number from 1 to VOCABULARY."""
        whole = [
            (torch.tensor([1 + crc32(word.encode()) % VOCABULARY for word in words]), chapter)
            for chapter, name in enumerate(CHAPTERS)
            for paragraph in re.split(r"\n\s*\n", topics[name])
            if len(words := re.findall(r"\w+", paragraph.lower())) >= 5
        ]
        order = torch.randperm(len(whole), generator=Generator().manual_seed(0)).tolist()
        return [whole[one] for one in order[200:]], [whole[one] for one in order[:200]]

    def collate(self, samples: Sequence[tuple[Tensor, int]]) -> tuple[Any, Tensor]:
        """Put the words of all paragraphs in one row, as EmbeddingBag takes them."""
        words, chapters = zip(*samples, strict=True)
        ends = torch.tensor([0, *map(len, words)]).cumsum(0)
        return (torch.cat(words), ends[:-1]), torch.tensor(chapters)

    def model(self) -> nn.Module:
        return Bag(self.width)


class Bag(nn.Module):
    """The mean of the words' vectors, and a layer on it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(VOCABULARY + 1, width)
        self.head = nn.Sequential(
            nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, len(CHAPTERS))
        )

    def forward(self, words: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = self.head(self.words(*words))
        return found


class Shapes(Task):
    """Six shapes in noise, for a small convolutional network. Each epoch draws other noise."""

    train: Train = Train(batch_size=32, epochs=24)
    width: int = 16
    goal: Goal = Goal("val/loss", "min", target=0.42)
    noise: float = 0.5
    search: ClassVar = {}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        images, labels = shapes(4500, 16, Generator().manual_seed(0))
        drawn = torch.randn(500, 1, 16, 16, generator=Generator().manual_seed(1))
        images[4000:] += self.noise * drawn
        return divided(images, labels, 4000)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in ((1, self.width), (self.width, 32), (32, 32)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 6))

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        if model.training:
            images = images + self.noise * torch.randn_like(images)
        return {"loss": cross_entropy(model(images), labels)}


class Crops(Dataset[tuple[Tensor, int]]):
    """Images with a frame of zeros: a random crop and flip of each, or the middle."""

    def __init__(self, images: Tensor, labels: Tensor, *, augment: bool) -> None:
        self.images, self.labels, self.augment = images, labels.tolist(), augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        down, across, flip = torch.randint(5, (3,)).tolist() if self.augment else (2, 2, 0)
        image = self.images[index, :, down : down + 12, across : across + 12]
        return image.flip(-1) if flip % 2 else image, self.labels[index]


class Images(Task):
    """Six shapes in fixed noise, with random crops and flips, for a convolutional network."""

    train: Train = Train(batch_size=32, epochs=14)
    width: int = 16
    goal: Goal = Goal("val/loss", "min", target=0.6)
    search: ClassVar = {"width": Choice(8, 16, 32)}

    def data(self) -> tuple[Crops, Crops]:
        images, labels = shapes(1900, 12, Generator().manual_seed(0))
        noise = 0.5 * torch.randn(images.shape, generator=Generator().manual_seed(1))
        framed = pad(images + noise, (2, 2, 2, 2))
        return (
            Crops(framed[:1500], labels[:1500], augment=True),
            Crops(framed[1500:], labels[1500:], augment=False),
        )

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in ((1, self.width), (self.width, self.width)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(9 * self.width, 6))


def shapes(count: int, side: int, drawn: Generator) -> tuple[Tensor, Tensor]:
    """Return squares, discs, rings and others at random places, (count, 1, side, side)."""
    labels = torch.randint(6, (count,), generator=drawn)
    x, y = torch.rand(2, count, 1, 1, generator=drawn) * (side - 10) + 5
    size = torch.rand(count, 1, 1, generator=drawn) * 2 + 2.5
    across = (torch.arange(side)[None, None, :] - x).abs()
    down = (torch.arange(side)[None, :, None] - y).abs()
    square, disc = torch.maximum(across, down), torch.hypot(across, down)
    kinds = [
        *(square < size, (square < size) & (square > size - 1.3)),
        *(disc < size, (disc < size) & (disc > size - 1.3)),
        *((square < size) & (torch.minimum(across, down) < 1), across + down < size),
    ]
    return torch.stack(kinds)[labels, torch.arange(count)][:, None].float(), labels


TASKS: dict[str, type[Task]] = {
    "rows": Rows,
    "letters": Letters,
    "chapters": Chapters,
    "images": Images,
    "knobs": Knobs,
}

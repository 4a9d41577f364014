"""A stream: handwritten digits in shards on disk, read one after the other.

rankzero train experiments/stream.py
"""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from digits import VALIDATION_SAMPLES, convnet, load
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, TensorDataset

from rankzero import Choice, Experiment, Goal, Train

Sample = tuple[Tensor, Tensor]


class Shards(IterableDataset[Sample]):
    """The samples of all files of a folder. The files have another order in each epoch."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.pt"))
        self.epoch, self.shard, self.row = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    # With these two, a resume continues at the same sample.
    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "shard": self.shard, "row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.shard, self.row = state["epoch"], state["shard"], state["row"]

    def __iter__(self) -> Iterator[Sample]:
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.files), generator=generator).tolist()
        while self.shard < len(order):
            images, labels = torch.load(self.files[order[self.shard]])
            while self.row < len(labels):
                self.row += 1
                yield images[self.row - 1], labels[self.row - 1]
            self.shard, self.row = self.shard + 1, 0
        self.shard = 0


class Stream(Experiment):
    train: Train = Train(steps=400, batch_size=64, schedule="one_cycle", eval_every=100)
    lr: float = 3e-3
    width: int = 32
    folder: str = "data/digit_shards"
    goal = Goal("val/accuracy", "max", target=0.97)
    search = {"width": Choice(16, 32, 64)}

    def data(self) -> tuple[Shards, TensorDataset]:
        images, labels = load()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, val = order[VALIDATION_SAMPLES:], order[:VALIDATION_SAMPLES]
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        for number, rows in enumerate(train.split(100)):
            # Every rank writes the shards, also on other machines. With a name of its own and a
            # rename, no rank reads half a file.
            torch.save((images[rows], labels[rows]), part := folder / secrets.token_hex(8))
            part.rename(folder / f"{number:03}.pt")
        return Shards(folder), TensorDataset(images[val], labels[val])

    def model(self) -> nn.Module:
        return convnet(self.width)

    def measure(self, model: nn.Module, batch: Sample) -> dict[str, Any]:
        images, labels = batch
        logits = model(images)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}

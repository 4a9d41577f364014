"""Reads lines of Python's own library, and says which are comments. It trains in seconds.

rankzero train text.py lr=0.01 train.epochs=4
rankzero config text.py          # every setting
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from rankzero import Choice, Experiment, Goal, Train

FILES = sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))
LENGTH = 64


class Reader(nn.Module):
    """A small transformer over bytes. Its mean over the line decides."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 2)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        found = self.encoder(self.bytes(text) + self.places(places))
        scores: Tensor = self.head(found.mean(1))
        return scores


class Text(Experiment):
    # Each field is a setting: a key on the command line, and a column in MLflow.
    train: Train = Train(epochs=4, batch_size=64, schedule="cosine", warmup_steps=20, clip=1.0)
    lr: float = 3e-3
    width: int = 32
    layers: int = 1
    # The checkpoint with the best value is kept as the best. `rankzero search` aims at the target.
    goal = Goal("val/accuracy", "max", target=0.9)
    search = {"width": Choice(16, 32, 64)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        """Return the training and the validation set: any data sets, map-style or iterable."""
        lines = [line.strip() for path in FILES for line in path.read_text("utf-8").splitlines()]
        comments = [line.lstrip("# ") for line in lines if line.startswith("#")]
        code = [line for line in lines if line.endswith((")", ":")) and line[0] != "#"]
        size = min(2000, len(comments), len(code))
        rows = [line.encode()[:LENGTH].ljust(LENGTH) for line in comments[:size] + code[:size]]
        text = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
        text = text.view(-1, LENGTH).long()
        labels = torch.arange(2 * size) // size
        # Every fifth line is for validation.
        held_out = torch.arange(2 * size) % 5 == 4
        train = TensorDataset(text[~held_out], labels[~held_out])
        return train, TensorDataset(text[held_out], labels[held_out])

    def model(self) -> nn.Module:
        """Return the model on the CPU. The weights follow from train.seed."""
        return Reader(self.width, self.layers)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the loss of a batch and other means, for training and for validation."""
        text, labels = batch
        logits = model(text)
        # No .item() here: every step would wait for the GPU.
        accuracy = (logits.argmax(-1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}

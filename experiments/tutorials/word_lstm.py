"""A word language model: an LSTM that keeps its state from batch to batch.

From pytorch/examples, word_language_model (77f55b9, 2025-08-25, BSD-3-Clause), in own words.
Data: the words of this project's documentation instead of WikiText-2.

rankzero train experiments/tutorials/word_lstm.py
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from rankzero import Experiment, Goal, Train

DOCS = Path(__file__).parents[2] / "docs"


def corpus() -> tuple[Tensor, int]:
    """Return all words of the pages as numbers, and how many different words there are."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))]
    words = [word for line in "\n".join(pages).split("\n") for word in [*line.split(), "\n"]]
    numbers: dict[str, int] = {}
    text = [numbers.setdefault(word, len(numbers)) for word in words]
    return torch.tensor(text), len(numbers)


def columns(text: Tensor, count: int) -> Tensor:
    """Divide a text into `count` columns of equal length: [count, words]."""
    return text[: len(text) // count * count].view(count, -1)


class Rnn(nn.Module):
    """Predicts the next word of each column. It remembers the state of each column."""

    def __init__(self, words: int, width: int, layers: int, dropout: float, count: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(width, words)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        # This is no buffer: DDP would give the columns of rank 0 to all ranks.
        self.memory = torch.zeros(2, layers, count, width)

    def get_extra_state(self) -> Tensor:
        """Return what a checkpoint has of the memory: the columns of rank 0."""
        return self.memory

    def set_extra_state(self, state: Tensor) -> None:
        self.memory = state

    def forward(
        self, text: Tensor, places: Tensor | None = None, begins: Tensor | None = None
    ) -> Tensor:
        """Continue the columns `places`, from zeros where `begins`. Without both: from zeros."""
        state = None
        if places is not None and begins is not None:
            self.memory = self.memory.to(text.device)
            state = (self.memory[:, :, places] * ~begins.unsqueeze(1)).unbind()
        output, state = self.rnn(self.drop(self.encoder(text)), state)
        if places is not None:
            self.memory[:, :, places] = torch.stack(state).detach()
        return self.decoder(self.drop(output))


class WordLstm(Experiment):
    train: Train = Train(
        epochs=40,
        batch_size=24,
        clip=0.25,
        schedule="plateau",
        plateau=Train.Plateau(factor=0.25, patience=1),
        seed=1111,
    )
    lr: float = 20.0
    width: int = 200
    layers: int = 2
    dropout: float = 0.2
    window: int = 35
    goal = Goal("val/loss", "min")

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        text, _ = corpus()
        count = self.train.batch_size
        windows = columns(text[: len(text) * 8 // 10], count).unfold(
            1, self.window + 1, self.window
        )
        place, number = (torch.arange(size) for size in windows.shape[:2])
        # First the first window of each column, then the second one of each.
        return TensorDataset(
            windows.transpose(0, 1).flatten(0, 1),
            place.repeat(len(number)),
            (number == 0).repeat_interleave(count),
        ), TensorDataset(columns(text[len(text) * 8 // 10 : len(text) * 9 // 10], 10))

    def test(self) -> TensorDataset:
        text, _ = corpus()
        return TensorDataset(columns(text[len(text) * 9 // 10 :], 10))

    def batches(self, data: TensorDataset, epoch: int, generator: Generator) -> list[range]:
        """Return the windows in the order of the text."""
        count = self.train.batch_size
        return [range(first, first + count) for first in range(0, len(data), count)]

    def model(self) -> nn.Module:
        _, words = corpus()
        return Rnn(words, self.width, self.layers, self.dropout, self.train.batch_size)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), self.lr)

    def measure(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        text, *where = batch  # An evaluation reads a whole column at once.
        logits = model(text[:, :-1], *where)
        return {"loss": cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())}

    def derive(self, values: Mapping[str, Any]) -> dict[str, float]:
        return {"perplexity": np.exp(values["loss"])}

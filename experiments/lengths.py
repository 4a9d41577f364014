"""Text of different lengths: which chapter of Python's language reference is a paragraph from?

rankzero train experiments/lengths.py     # on one, two or four devices
"""

import re
from collections.abc import Sequence
from pydoc_data.topics import topics
from zlib import crc32

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset

from rankzero import Choice, Experiment, Goal, Train
from rankzero.batches import by_length

CHAPTERS = ["compound", "debugger", "formatstrings", "specialnames", "string-methods", "types"]
VOCABULARY = 2000
LONGEST = 150  # Words of a paragraph. A longer one is cut.
Sample = tuple[Tensor, int]


def paragraphs() -> list[Sample]:
    """Return (words, chapter) of each paragraph. A word is a number from 1 to VOCABULARY."""
    return [
        (torch.tensor([1 + crc32(word.encode()) % VOCABULARY for word in words[:LONGEST]]), chapter)
        for chapter, name in enumerate(CHAPTERS)
        for paragraph in re.split(r"\n\s*\n", topics[name])
        if len(words := re.findall(r"\w+", paragraph.lower())) >= 5
    ]


class Reader(nn.Module):
    """A recurrent network, and the largest value of each of its outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY + 1, width, padding_idx=0)
        # Forwards only. Backwards it would read the padding first, which depends on the batch.
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(width, len(CHAPTERS)))

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.rnn(self.words(words))
        padding = (words == 0).unsqueeze(-1)
        return self.head(states.masked_fill(padding, -1.0).amax(1))


class Chapters(Experiment):
    train: Train = Train(epochs=8, batch_size=32, schedule="one_cycle")
    lr: float = 1e-2
    width: int = 32
    step_words: int = 1024  # Words in a step, with padding.
    goal = Goal("val/accuracy", "max")
    search = {"width": Choice(16, 32, 64)}

    def data(self) -> tuple[Subset[Sample], Subset[Sample]]:
        whole = paragraphs()
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0)).tolist()
        return Subset(whole, order[200:]), Subset(whole, order[:200])

    def batches(self, data: Subset[Sample], epoch: int, generator: Generator) -> list[list[int]]:
        """Put paragraphs of similar length together: many short ones, or a few long ones."""
        lengths = [len(words) for words, _ in data]
        return by_length(lengths, generator, tokens=self.step_words, multiple_of=4)

    def collate(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Pad to the longest paragraph of this batch."""
        words, chapters = zip(*samples, strict=True)
        return pad_sequence(list(words), batch_first=True), torch.tensor(chapters)

    def model(self) -> nn.Module:
        return Reader(self.width)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        words, chapters = batch
        logits = model(words)
        accuracy = (logits.argmax(-1) == chapters).float().mean()
        return {"loss": cross_entropy(logits, chapters), "accuracy": accuracy}

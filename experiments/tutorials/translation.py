"""Translation with attention: from digits to English words, "42" to "forty two".

From pytorch/tutorials, intermediate_source/seq2seq_translation_tutorial.py (4ed884d, 2024-10-21,
BSD-3-Clause), in own words. Data: the numbers up to 9999 instead of French sentences.

rankzero train experiments/tutorials/translation.py
"""

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from rankzero import Experiment, Goal, Train

NAMES = """start end zero one two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty
ninety hundred thousand"""
WORDS = NAMES.split()
START, END, ZERO = 0, 1, 2
LONGEST = 10


def in_words(number: int) -> list[str]:
    if number >= 100:
        size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
        rest = in_words(number % size) if number % size else []
        return [*in_words(number // size), name, *rest]
    if number < 20:
        return [WORDS[ZERO + number]]
    tens = WORDS[ZERO + 18 + number // 10]
    return [tens, *in_words(number % 10)] if number % 10 else [tens]


def padded(tokens: list[int]) -> list[int]:
    return [*tokens, END, *[START] * (LONGEST - len(tokens) - 1)]


class Encoder(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(words, width), nn.Dropout(0.1)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.gru(self.drop(self.embedding(text)))


class Decoder(nn.Module):
    """Chooses one word after the other, with Bahdanau's attention to the encoder's outputs."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(words, width), nn.Dropout(0.1)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.score = nn.Linear(width, 1)
        self.gru = nn.GRU(2 * width, width, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, seen: Tensor, state: Tensor, answer: Tensor | None) -> Tensor:
        word = torch.full_like(seen[:, :1, 0], START, dtype=torch.long)
        found = []
        for place in range(LONGEST):
            scores = self.score(torch.tanh(self.query(state.transpose(0, 1)) + self.key(seen)))
            context = scores.softmax(1).transpose(1, 2) @ seen
            inputs = torch.cat([self.drop(self.embedding(word)), context], 2)
            output, state = self.gru(inputs, state)
            found.append(self.out(output))
            # The teacher gives the right word. Without it, the decoder continues its own text.
            word = found[-1].argmax(-1) if answer is None else answer[:, place : place + 1]
        return torch.cat(found, 1)


class Translator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(12, width), Decoder(len(WORDS), width)

    def forward(self, text: Tensor, answer: Tensor | None = None) -> Tensor:
        return self.decoder(*self.encoder(text), answer)


class Translation(Experiment):
    train: Train = Train(epochs=80, batch_size=32)
    width: int = 128
    numbers: int = 10_000
    goal = Goal("val/accuracy", "max")

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        numbers = range(self.numbers)
        digits = [padded([ZERO + int(digit) for digit in str(number)]) for number in numbers]
        words = [padded([WORDS.index(word) for word in in_words(number)]) for number in numbers]
        pairs = torch.tensor(digits), torch.tensor(words)
        held_out = torch.arange(self.numbers) % 10 == 9
        return (
            TensorDataset(*(tokens[~held_out] for tokens in pairs)),
            TensorDataset(*(tokens[held_out] for tokens in pairs)),
        )

    def model(self) -> nn.Module:
        return Translator(self.width)

    def optimizer(self, model: Any) -> dict[str, optim.Optimizer]:
        return {
            "encoder": optim.Adam(model.encoder.parameters(), self.lr),
            "decoder": optim.Adam(model.decoder.parameters(), self.lr),
        }

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        text, answer = batch
        logits = model(text, answer) if model.training else model(text)
        right = (logits.argmax(-1) == answer).all(1).float().mean()
        return {"loss": cross_entropy(logits.flatten(0, 1), answer.flatten()), "accuracy": right}

"""Sentence pairs as in GLUE's MRPC: does the second sentence mean the same as the first?

From huggingface/transformers 4.23, examples/pytorch/text-classification/run_glue_no_trainer.py
(ca485e5, 2022-09-16, Apache-2.0), in own words. Data: made-up sentences whose words have synonyms.
The network has BERT's layers and begins from scratch, because nothing is downloaded.

rankzero train experiments/tutorials/glue_pairs.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from rankzero import Experiment, Goal, Ratio, Train

MEANINGS, LONGEST = 10, 8  # Each meaning has two words. A sentence has up to LONGEST of them.
PADDING, BEGIN, SEPARATOR, FIRST_WORD = range(4)
Pair = tuple[Tensor, Tensor, int]


def pairs(count: int, seed: int) -> list[Pair]:
    """Return tokens, which sentence each belongs to, and whether both mean the same."""
    generator = torch.Generator().manual_seed(seed)

    def draw(below: int, size: int) -> Tensor:
        return torch.randint(below, (size,), generator=generator)

    found = []
    for _ in range(count):
        size = 3 + int(draw(LONGEST - 2, 1))
        first = draw(MEANINGS, size)
        same = int(draw(3, 1)) > 0  # Two of three, as in MRPC.
        second = first if same else draw(MEANINGS, size)
        sentences = [FIRST_WORD + 2 * words + draw(2, size) for words in (first, second)]
        end = torch.tensor([SEPARATOR])
        tokens = torch.cat([torch.tensor([BEGIN]), sentences[0], end, sentences[1], end])
        found.append((tokens, (torch.arange(len(tokens)) > size + 1).long(), int(same)))
    return found


class Bert(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(FIRST_WORD + 2 * MEANINGS, width)
        self.places = nn.Embedding(2 * LONGEST + 3, width)
        self.sentences = nn.Embedding(2, width)
        self.norm = nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.1))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 2)
        )

    def forward(self, tokens: Tensor, sentences: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        sums = self.words(tokens) + self.places(places) + self.sentences(sentences)
        states = self.encoder(self.norm(sums), src_key_padding_mask=tokens == PADDING)
        return self.head(states[:, 0])


class GluePairs(Experiment):
    train: Train = Train(epochs=30, batch_size=32, schedule="linear")
    lr: float = 1e-3
    weight_decay: float = 0.01
    width: int = 64
    layers: int = 2
    samples: int = 3000
    goal = Goal("val/f1", "max")

    def data(self) -> tuple[list[Pair], list[Pair]]:
        return pairs(self.samples, seed=1), pairs(self.samples // 10, seed=2)

    def collate(self, samples: Sequence[Pair]) -> dict[str, Tensor]:
        """Pad to the longest pair of this batch."""
        tokens, sentences, labels = zip(*samples, strict=True)
        return {
            "tokens": pad_sequence(list(tokens), batch_first=True, padding_value=PADDING),
            "sentences": pad_sequence(list(sentences), batch_first=True),
            "labels": torch.tensor(labels),
        }

    def model(self) -> nn.Module:
        return Bert(self.width, self.layers)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        """Return AdamW that decays neither biases nor norms."""
        decayed = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0, "name": "rest"}]
        return optim.AdamW(groups, self.lr, weight_decay=self.weight_decay)

    def measure(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        labels = batch["labels"]
        logits = model(batch["tokens"], batch["sentences"])
        guesses = logits.argmax(-1)
        found = ((guesses == 1) & (labels == 1)).sum()
        return {
            "loss": cross_entropy(logits, labels),
            "accuracy": (guesses == labels).float().mean(),
            # F1 is 2 TP / (2 TP + FP + FN), a quotient of sums.
            "f1": Ratio(2 * found, (guesses == 1).sum() + (labels == 1).sum()),
        }

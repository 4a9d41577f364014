"""A small GPT that writes documentation: it predicts the next byte of this project's own pages.

rankzero train experiments/gpt.py
rankzero train experiments/gpt.py width=128 layers=4 train.batch_size=64 train.precision=bf16
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import TensorDataset

from rankzero import Choice, Experiment, Goal, Ratio, Train, UserError

PAGES = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
PADDING = 0  # No page has this byte.


class Block(nn.Module):
    """Attention to the bytes before, then a small network for each byte."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.bytes(text) + self.places(places)))


class SmallGPT(Experiment):
    train: Train = Train(epochs=4, batch_size=32, schedule="cosine", warmup_steps=20, clip=1.0)
    lr: float = 3e-3
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    goal = Goal("val/perplexity", "min")
    search = {"width": Choice(32, 64, 128)}

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        """Return windows [n, context + 1]. Every tenth is for validation."""
        windows = []
        if not PAGES:
            raise UserError(f"no pages in {Path(__file__).parents[1]}/docs: let PAGES name yours")
        for page in PAGES:
            text = torch.frombuffer(bytearray(page.read_bytes()), dtype=torch.uint8).long()
            # A window begins with the last byte of the one before. A page's last one is padded.
            text = nn.functional.pad(text, (0, -(len(text) - 1) % self.context), value=PADDING)
            windows.append(text.unfold(0, self.context + 1, self.context))
        whole = torch.cat(windows)
        held_out = torch.arange(len(whole)) % 10 == 9
        return TensorDataset(whole[~held_out]), TensorDataset(whole[held_out])

    def model(self) -> nn.Module:
        return GPT(self.width, self.layers, self.heads, self.context)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.AdamW(model.parameters(), self.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def measure(self, model: nn.Module, batch: tuple[Tensor]) -> dict[str, Any]:
        text, following = batch[0][:, :-1], batch[0][:, 1:]
        logits = model(text).flatten(0, 1)
        loss = cross_entropy(logits, following.flatten(), ignore_index=PADDING, reduction="sum")
        # Every byte counts the same, although the last windows of pages have fewer.
        return {"loss": Ratio(loss, (following != PADDING).sum())}

    def tokens(self, batch: tuple[Tensor]) -> int:
        return batch[0][:, 1:].numel()

    def derive(self, values: Mapping[str, Any]) -> dict[str, float]:
        return {"perplexity": np.exp(values["loss"])}

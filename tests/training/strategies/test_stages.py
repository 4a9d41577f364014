"""Cutting a model into pipeline stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.training.strategies.stages import balanced, cut, make_stage


def test_sequential_model_is_cut_by_weights() -> None:
    assert balanced([10, 0, 10, 0, 10, 10], 2) == [0, 4]
    assert balanced([1, 1, 1], 3) == [0, 1, 2]
    assert balanced([100, 1, 0, 1], 3) == [0, 1, 3]
    with pytest.raises(UserError, match="2 items with weights, too few for 3"):
        balanced([1, 0, 1], 3)
    with pytest.raises(UserError, match="has no weights"):
        cut(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["1"], 2)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        return self.last(hidden if hidden.sum() > 0 else -hidden)


def test_a_model_that_cannot_be_traced_is_refused_with_the_reason() -> None:
    def example() -> Tensor:
        return torch.ones(1, 2)

    with pytest.raises(UserError, match=r"cannot trace the model: .*data-dependent") as caught:
        make_stage(Branching(), ["last"], 0, 2, torch.device("cpu"), example)
    assert str(caught.value).endswith("; use an nn.Sequential, or ddp or fsdp")
    assert "\n" not in str(caught.value)

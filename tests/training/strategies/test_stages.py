"""Cutting a model into pipeline stages."""

from __future__ import annotations

import pytest
from torch import nn

from rankzero.errors import UserError
from rankzero.training.strategies.stages import balanced, cut


def test_sequential_model_is_cut_by_weights() -> None:
    assert balanced([10, 0, 10, 0, 10, 10], 2) == [0, 4]
    assert balanced([1, 1, 1], 3) == [0, 1, 2]
    assert balanced([100, 1, 0, 1], 3) == [0, 1, 3]
    with pytest.raises(UserError, match="2 items with weights, too few for 3"):
        balanced([1, 0, 1], 3)
    with pytest.raises(UserError, match="has no weights"):
        cut(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["1"], 2)

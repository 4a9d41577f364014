"""Recomputed activations: the same bits, with less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.training.strategies import units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.layers = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x + self.layers(x)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 1))


def gradients(model: nn.Module) -> list[Tensor | None]:
    torch.manual_seed(1)
    model(torch.randn(8, 4)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_recomputed_units_have_the_same_gradients_names_and_statistics() -> None:
    plain, model = blocks(), blocks()
    units.recompute(model, compiled=False)
    for one, other in zip(gradients(plain), gradients(model), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
    assert list(plain.state_dict()) == list(model.state_dict())
    # BatchNorm's statistics count the batch once.
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
    assert (plain[0].forwards, model[0].forwards) == (1, 2), "nothing was recomputed"


def test_a_copy_of_a_model_uses_its_own_weights() -> None:
    model = blocks().eval()
    units.recompute(model, compiled=False)
    other, x = copy.deepcopy(model), torch.ones(2, 4)
    before = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(other(x), before) and not torch.equal(model(x), before)


def test_a_model_without_units_is_refused() -> None:
    with pytest.raises(UserError, match="the model has none: put its layers into one"):
        units.recompute(nn.Linear(2, 2), compiled=False)


def test_units_in_a_list_of_lists_are_its_innermost_items() -> None:
    block = Block()
    model = nn.ModuleList([nn.ModuleList([block, nn.ReLU()]), nn.ModuleList([nn.Linear(4, 1)])])
    first, second = units.units(nn.ModuleDict({"stages": model}))
    assert first is block and isinstance(second, nn.Linear)

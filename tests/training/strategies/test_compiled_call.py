"""A model is compiled in place as one graph, whatever its class."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankzero.training.strategies.compiled_call import COMPILED_CALL, compile_whole


class Widening(nn.Module):
    """A part of a model, which PyTorch 2.11 compiled by itself."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * inputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def test_the_private_attribute_exists() -> None:
    model = nn.Linear(3, 2)
    assert getattr(model, COMPILED_CALL) is None
    model.compile(backend="eager")
    assert callable(getattr(model, COMPILED_CALL))


def test_a_sequential_model_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    model = nn.Sequential(Widening(2), Widening(4), Widening(8))
    x = torch.rand(3, 2)
    plain, names = model(x), list(model.state_dict())
    compile_whole(model, dynamic=None)
    found = model(x)
    assert torch.equal(found, plain) and len(graphs) == 1
    found.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert list(model.state_dict()) == names
    # A copy is a plain model: it would call the one that it was copied from.
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].linear.weight.zero_()
    assert not torch.equal(twin(x), plain) and len(graphs) == 1


def test_models_do_not_share_what_is_known_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second would be compiled for any number of samples, which is slower."""
    is_for_any: list[bool] = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        is_for_any.append(any(isinstance(one, torch.SymInt) for one in inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=note))
    for samples in (3, 4, 5):
        model = nn.Sequential(Widening(2))
        compile_whole(model, dynamic=None)
        model(torch.rand(samples, 2))
    assert is_for_any == [False] * 3

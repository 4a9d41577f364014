"""What FSDP refuses, in words that say what to do."""

from __future__ import annotations

import copy
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rankzero.errors import UserError
from rankzero.ranks import Ranks
from rankzero.training.distributed.world import World
from rankzero.training.strategies.base import MicroBatchStep, Shard
from rankzero.training.strategies.replicated import Replicated, _divided
from rankzero.training.strategies.sharded import Sharded, fsdp
from support.training import tiny


def of_two_types() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2))


@pytest.mark.usefixtures("group")
def test_a_model_of_several_types_is_refused_with_advice() -> None:
    model = of_two_types()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters())
    strategy = Sharded(model, optimizer, Shard(0, 1), World(Ranks(), torch.device("cpu")))
    how = cast(MicroBatchStep, SimpleNamespace(forward_backward=lambda model, x: model(x)))
    with pytest.raises(UserError, match=r"fsdp cannot divide the model: .*; use ddp$"):
        strategy.forward_backward(how, torch.ones(1, 2))
    # zero1 refuses it, too, so neither names the other.
    with pytest.raises(UserError, match=r"zero1 cannot divide SGD: .*; use ddp$"):
        _divided(torch.optim.SGD(of_two_types().parameters()))


@pytest.mark.usefixtures("group")
def test_zero1_holds_a_loaded_state_once() -> None:
    model, world = nn.Linear(2, 2), World(Ranks(), torch.device("cpu"))
    optimizer = _divided(torch.optim.Adam(model.parameters()))
    strategy = Replicated(model, model, optimizer, Shard(0, 1), world)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(strategy.state()["optimizer"])
    strategy.load({"model": model.state_dict(), "optimizer": copy.deepcopy(saved)})
    assert not optimizer.state and saved["state"]
    assert str(strategy.state()["optimizer"]) == str(saved)


class Decaying(torch.optim.Adam):
    """With a decay that the learning rate does not scale."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)
        super().step(closure)


@pytest.mark.usefixtures("group")
def test_loading_an_optimizer_changes_no_weight() -> None:
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    world = World(Ranks(), torch.device("cpu"))
    strategy = Sharded(model, Decaying(model.parameters()), Shard(0, 1), world)
    strategy.state()  # PyTorch makes the states of the optimizer.
    saved = copy.deepcopy(strategy.state())
    dataclasses.replace(strategy, optimizer=Decaying(model.parameters())).load(saved)
    assert torch.equal(strategy.model_state()["weight"], saved["model"]["weight"])


class Orthogonal(torch.optim.SGD):
    """An optimizer with an argument that its groups do not have."""

    def __init__(self, params: Any, ns_steps: int = 5) -> None:
        super().__init__(params, lr=0.1)
        self._ns_steps = ns_steps
        self.cache = object()


@pytest.mark.usefixtures("group")
def test_zero1_refuses_an_optimizer_that_it_would_change() -> None:
    model = nn.Linear(2, 2)
    scheduled = Orthogonal(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(scheduled, float)  # it replaces step()
    _divided(scheduled)
    with pytest.raises(UserError, match=r"`defaults`, which have no _ns_steps; use ddp or fsdp$"):
        _divided(Orthogonal(model.parameters(), ns_steps=3))
    hooked = torch.optim.SGD(model.parameters())
    hooked.register_step_post_hook(print)
    with pytest.raises(UserError, match="have no _optimizer_step_post_hooks; use ddp or fsdp"):
        _divided(hooked)


def test_a_parameter_without_dimensions_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("logit_scale", nn.Parameter(torch.ones(())))
    world = World(Ranks(world_size=2), torch.device("cpu"))
    with pytest.raises(UserError, match=r"fsdp cannot divide logit_scale, .*torch\.ones\(1\)"):
        fsdp(tiny(train__strategy="fsdp"), model, world)


class Damped(nn.Module):
    """A block with a constant of its own, as stochastic depth has."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.linear, self.place = nn.Linear(2, 2), place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) / (1 + self.place)


def test_many_unlike_blocks_are_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []
    sharded = "rankzero.training.strategies.sharded"
    monkeypatch.setattr(f"{sharded}.fully_shard", lambda *_, **__: None)
    monkeypatch.setattr(f"{sharded}.init_device_mesh", lambda *_: None)

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
    model = nn.Sequential(*(Damped(place) for place in range(12)))
    world = World(Ranks(world_size=2), torch.device("cpu"))
    # pytest's own patch would take the settings away at its end.
    with (
        torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8),
        torch.no_grad(),
    ):
        fsdp(tiny(train__strategy="fsdp", train__compile=True), model, world)
        model(torch.ones(1, 2))
    assert len(graphs) == 12

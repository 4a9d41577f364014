"""Several optimizers as one: their checks, and their state in the form of one optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn, optim

from rankzero.errors import UserError
from rankzero.training.optimization import joint_optimizer
from rankzero.training.optimization.joint_optimizer import JointOptimizer


def divided(model: nn.Sequential) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return list(model[0].parameters()), list(model[1].parameters())


def stepped(model: nn.Module, optimizer: optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_state_is_that_of_one_optimizer_with_the_same_groups() -> None:
    one_model, model = layers(), layers()
    one = optim.Adam([{"params": one} for one in divided(one_model)], lr=0.1)
    first, second = divided(model)
    joint = JointOptimizer({"a": optim.Adam(first, lr=0.1), "b": optim.Adam(second, lr=0.1)})
    stepped(one_model, one)
    stepped(model, joint)
    torch.testing.assert_close(one.state_dict(), joint.state_dict(), rtol=0, atol=0)
    # A checkpoint of the one optimizer continues with the two.
    stepped(one_model, one)
    model.load_state_dict(one_model.state_dict())
    joint.load_state_dict(copy.deepcopy(one.state_dict()))
    stepped(one_model, one)
    stepped(model, joint)
    assert all(map(torch.equal, model.parameters(), one_model.parameters()))


class Plain(optim.SGD):
    """An optimizer without a closure, as many of a user's own."""

    def step(self) -> None:  # type: ignore[override]
        super().step()


def test_a_part_needs_no_closure() -> None:
    model = layers()
    first, second = divided(model)
    before = first[0].clone()
    stepped(model, JointOptimizer({"a": Plain(first, lr=0.1), "b": optim.Adam(second, lr=0.1)}))
    assert not torch.equal(first[0], before)


class Counting(optim.SGD):
    """Stores the number of its steps, among the states and next to them."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.count += 1
        self.state["all"] = {"count": self.count}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})


def test_what_else_an_optimizer_stores_is_loaded_again() -> None:
    made = []
    for steps in (3, 0):
        model = layers()
        parts = zip("ab", divided(model), strict=True)
        made.append(JointOptimizer({name: Counting(one, lr=0.1) for name, one in parts}))
        for _ in range(steps):
            stepped(model, made[-1])
    made[1].load_state_dict(copy.deepcopy(made[0].state_dict()))
    for name in "ab":
        part: Any = made[1].parts[name]
        assert (part.count, part.state["all"]) == (3, {"count": 3})


def test_other_groups_are_refused() -> None:
    first, second = divided(layers())
    joint = JointOptimizer({"a": optim.SGD(first), "b": optim.SGD(second)})
    with pytest.raises(ValueError, match="it has 1 groups of parameters, the optimizers have 2"):
        joint.load_state_dict(optim.SGD(layers().parameters()).state_dict())


def test_an_overflow_in_one_optimizer_skips_the_step_of_all() -> None:
    model, scaler = layers(), torch.amp.GradScaler("cpu", init_scale=4.0)
    first, second = divided(model)
    joint = JointOptimizer({"a": optim.SGD(first, lr=0.1), "b": optim.Adam(second, lr=0.1)})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    assert model[1].bias.grad is not None
    model[1].bias.grad.fill_(float("inf"))
    scaler.step(joint)
    scaler.update()
    assert all(map(torch.equal, model.parameters(), before)) and scaler.get_scale() == 2.0
    stepped(model, joint)
    assert not any(map(torch.equal, model.parameters(), before))


def only_one_layer(model: nn.Sequential) -> Mapping[str, Any]:
    return {"a": optim.SGD(model[0].parameters())}


def one_bias_twice(model: nn.Sequential) -> Mapping[str, Any]:
    return {"a": optim.SGD(model.parameters()), "b": optim.SGD([model[1].bias])}


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (only_one_layer, "optimizer() gives '1.weight' to no optimizer"),
        (one_bias_twice, "optimizer() gives '1.bias' to 'a' and to 'b'"),
    ],
)
def test_each_parameter_has_one_optimizer(optimizer: Any, says: str) -> None:
    model = layers()
    with pytest.raises(UserError) as error:
        joint_optimizer.check(optimizer(model), model)
    assert says in str(error.value)
    frozen = model.requires_grad_(False)
    joint_optimizer.check({"a": optim.SGD(frozen[0].parameters())}, frozen)

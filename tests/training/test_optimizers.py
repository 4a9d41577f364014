"""Optimizers: fused where that changes nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from rankzero.training.optimizers import fused, place_steps


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def test_pytorchs_own_optimizers_are_fused_where_the_choice_is_open() -> None:
    model = linear()
    made = fused(optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model, "fp32")
    assert made.param_groups[0]["fused"] is True and made.param_groups[0]["weight_decay"] == 0.5
    chosen = optim.AdamW(model.parameters(), foreach=True)
    assert fused(chosen, model, "fp32") is chosen


def test_sparse_gradients_are_left_to_an_optimizer_that_takes_them() -> None:
    model = nn.Sequential(nn.Embedding(8, 2, sparse=True), nn.Linear(2, 1))
    optimizer = fused(optim.SGD(model.parameters(), lr=0.1), model, "fp32")
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


def test_what_hangs_on_an_optimizer_stays() -> None:
    model, called = linear(), []
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))
    model(torch.ones(1, 2)).sum().backward()
    fused(optimizer, model, "fp32").step()
    assert called == ["hook"]
    scheduled = optim.SGD(model.parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(scheduled, 1)  # wraps `step`
    assert fused(scheduled, model, "fp32") is scheduled


@pytest.fixture
def uninitialised() -> Iterator[None]:
    """Memory that PyTorch has not written holds NaN, as PyTorch has it in its deterministic mode."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty_like(torch.ones(3)).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def after_an_overflow(optimizer: optim.Optimizer, model: nn.Linear) -> Tensor:
    """Return the weights after a first step that overflows, which the scaler skips, and a good one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for value in (float("inf"), 1.0):
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.usefixtures("uninitialised")
def test_sgd_whose_first_step_overflows_has_no_momentum_out_of_nowhere() -> None:
    chosen, made = linear(), linear()
    made.load_state_dict(chosen.state_dict())
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    assert (
        after_an_overflow(optim.SGD(chosen.parameters(), **settings, fused=True), chosen)
        .isnan()
        .any()
    )  # PyTorch's
    before = made.weight.detach().clone()
    weight = after_an_overflow(fused(optim.SGD(made.parameters(), **settings), made, "fp16"), made)
    assert torch.allclose(weight, before - 0.1)


def test_counts_of_steps_are_where_the_kernels_look() -> None:
    """On the parameter's device where they are fused; the device "meta" stands for a GPU."""
    for kind, is_fused, place in ((optim.AdamW, True, "meta"), (optim.AdamW, False, "cpu")):
        parameter = nn.Parameter(torch.ones(2, device="meta"))
        optimizer = kind([parameter])
        optimizer.param_groups[0]["fused"] = is_fused
        optimizer.state[parameter] = {"step": torch.tensor(3.0)}
        place_steps(optimizer)
        assert optimizer.state[parameter]["step"].device.type == place
    plain = optim.SGD([parameter], lr=0.1)
    place_steps(plain)
    assert not plain.state[parameter]
    outer, inner = (
        optim.AdamW([parameter]),
        optim.AdamW([parameter]),
    )  # as ZeRO has them, whose inner options lag behind
    outer.optim = inner  # type: ignore[attr-defined]
    outer.param_groups[0]["fused"], outer.state[parameter] = True, None
    inner.state[parameter] = {"step": torch.tensor(3.0)}
    place_steps(outer)
    assert inner.state[parameter]["step"].device.type == "meta"

"""Optimizers: fused where that changes nothing else."""

from __future__ import annotations

import torch
from torch import nn, optim

from rankzero.train.optimizers import fused


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def test_pytorchs_own_optimizers_are_fused_where_the_choice_is_open() -> None:
    model = linear()
    made = fused(optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model)
    assert made.param_groups[0]["fused"] is True and made.param_groups[0]["weight_decay"] == 0.5
    chosen = optim.AdamW(model.parameters(), foreach=True)
    assert fused(chosen, model) is chosen


def test_sparse_gradients_are_left_to_an_optimizer_that_takes_them() -> None:
    model = nn.Sequential(nn.Embedding(8, 2, sparse=True), nn.Linear(2, 1))
    optimizer = fused(optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


def test_what_hangs_on_an_optimizer_stays() -> None:
    model, called = linear(), []
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))
    model(torch.ones(1, 2)).sum().backward()
    fused(optimizer, model).step()
    assert called == ["hook"]
    scheduled = optim.SGD(model.parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(scheduled, 1)  # wraps `step`
    assert fused(scheduled, model) is scheduled

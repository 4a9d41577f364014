"""A scheduler's factors as a function of the step, compared with the scheduler itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from rankzero.errors import UserError
from rankzero.lightning_module.lr_schedule import ReplayedScheduler, optimizer_and_scheduler

STEPS = 30


def warm_then_cosine(optimizer: Optimizer) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
        lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 7),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.3, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "sequence": warm_then_cosine,
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.ExponentialLR(optimizer, 0.95)],
        optimizer,
    ),
}


def made(kind: Any = SGD, **settings: Any) -> Optimizer:
    optimizer: Optimizer = kind([nn.Parameter(torch.zeros(2))], lr=0.1, **settings)
    return optimizer


@pytest.mark.parametrize("name", SCHEDULERS)
def test_factors_equal_the_schedulers_own_rates(name: str) -> None:
    real = made()
    theirs = SCHEDULERS[name](real)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [real.param_groups[0]["lr"]]
        for _ in range(STEPS):
            real.step()
            theirs.step()
            wanted.append(real.param_groups[0]["lr"])
    optimizer = made()
    factors = ReplayedScheduler(optimizer, SCHEDULERS[name](optimizer))
    initial = optimizer.param_groups[0]["initial_lr"]
    backwards = [initial * factors.after(count)[0] for count in range(STEPS, -1, -1)]
    assert backwards[::-1] == pytest.approx(wanted, abs=1e-12)


def test_replay_does_not_change_the_optimizer() -> None:
    optimizer = made(AdamW, weight_decay=0.3)
    scheduler = SCHEDULERS["cosine"](optimizer)
    before = dict(optimizer.param_groups[0])
    ReplayedScheduler(optimizer, scheduler).after(20)
    assert optimizer.param_groups[0] == before


def test_scheduler_that_changes_more_than_the_rate_is_refused() -> None:
    optimizer = made(AdamW)
    with pytest.raises(UserError, match="cycle_momentum=False"):
        ReplayedScheduler(optimizer, lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=50))


def test_a_scheduler_may_treat_groups_differently() -> None:
    groups = SGD(
        [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))]}],
        lr=0.1,
    )
    apart = lr_scheduler.LambdaLR(groups, [lambda step: 1.0, lambda step: 0.5**step])
    assert ReplayedScheduler(groups, apart).after(2) == [1.0, 0.25]


def test_every_result_form_of_configure_optimizers_is_read() -> None:
    optimizer = made()
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    assert optimizer_and_scheduler(optimizer) == (optimizer, None, "step", 1)
    assert optimizer_and_scheduler([optimizer]) == (optimizer, None, "step", 1)
    assert optimizer_and_scheduler(([optimizer], [scheduler])) == (optimizer, scheduler, "epoch", 1)
    each = {"scheduler": scheduler, "interval": "step", "frequency": 2}
    assert optimizer_and_scheduler({"optimizer": optimizer, "lr_scheduler": each}) == (
        optimizer,
        scheduler,
        "step",
        2,
    )
    assert optimizer_and_scheduler({"optimizer": optimizer, "lr_scheduler": scheduler}) == (
        optimizer,
        scheduler,
        "epoch",
        1,
    )


def test_a_scheduler_in_a_list_of_dicts_or_without_a_list_is_not_lost() -> None:
    optimizer = made()
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    each = {"scheduler": scheduler, "interval": "step"}
    in_step, in_epoch = (optimizer, scheduler, "step", 1), (optimizer, scheduler, "epoch", 1)
    assert optimizer_and_scheduler([{"optimizer": optimizer, "lr_scheduler": each}]) == in_step
    assert optimizer_and_scheduler([{"optimizer": optimizer, "lr_scheduler": scheduler}]) == (
        in_epoch
    )
    assert optimizer_and_scheduler(([optimizer], each)) == in_step
    assert optimizer_and_scheduler(([optimizer], scheduler)) == in_epoch
    assert optimizer_and_scheduler([[optimizer], scheduler]) == in_epoch
    assert optimizer_and_scheduler(([optimizer], [])) == (optimizer, None, "step", 1)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "returned 0 optimizers"),
        ((made(), lr_scheduler.StepLR(made(), 3)), r"returned a StepLR .* \[scheduler\]"),
        ([made(), made()], "returned 2 optimizers"),
        ([{"optimizer": made()}, {"optimizer": made()}], "returned 2 optimizers"),
        (([made()], [lr_scheduler.ReduceLROnPlateau(made())]), "needs a metric"),
    ],
)
def test_unsupported_optimizers_and_schedulers_are_refused(found: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        optimizer_and_scheduler(found)

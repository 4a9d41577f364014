"""What `configure_optimizers` returns: one optimizer, and a learning-rate scheduler as a function of the step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rankzero.errors import UserError

CYCLED = ("momentum", "betas")
"""What some schedulers change besides the learning rate."""


def configured(found: Any) -> tuple[Optimizer, Any, str, int]:
    """Return (optimizer, scheduler or None, interval, frequency) of `configure_optimizers`' result.

    Raises UserError for what RankZero's loop does not do: several optimizers, none, or a scheduler that waits for a
    metric.
    """
    optimizers, schedulers = _pair(found)
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise UserError(
            f"configure_optimizers returned {len(optimizers)} optimizers and {len(schedulers)} schedulers: RankZero's "
            "loop takes one optimizer and at most one scheduler"
        )
    if not schedulers:
        return optimizers[0], None, "step", 1
    settings = schedulers[0] if isinstance(schedulers[0], Mapping) else {"scheduler": schedulers[0]}
    scheduler = settings["scheduler"]
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UserError(
            "ReduceLROnPlateau waits for a metric: use a scheduler that depends on the step alone"
        )
    return (
        optimizers[0],
        scheduler,
        settings.get("interval", "epoch"),
        int(settings.get("frequency", 1)),
    )


class ReplayedScheduler:
    """What a scheduler multiplies the initial learning rates by after so many of its steps.

    The scheduler is played on a stand-in for its optimizer, as far as was asked for. Raises UserError for one that
    changes anything else, or groups differently.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        self._rates = [group["initial_lr"] for group in optimizer.param_groups]
        self._shadow, self._scheduler = _shadow(optimizer), scheduler
        self._beside = self._others()
        self._factors: list[float] = []
        _rebind(scheduler, optimizer, self._shadow)
        self._note()
        self.after(1)

    def after(self, count: int) -> float:
        """Return the factor after `count` of the scheduler's steps."""
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that optimizer.step() was not called before: it never is
            while len(self._factors) <= count:
                self._scheduler.step()
                self._note()
        return self._factors[count]

    def _note(self) -> None:
        groups = self._shadow.param_groups
        factors = [
            float(group["lr"]) / rate if rate else 1.0
            for group, rate in zip(groups, self._rates, strict=True)
        ]
        if max(factors) - min(factors) > 1e-6 * max(map(abs, factors)):
            raise UserError(
                "the scheduler treats parameter groups differently, which RankZero's loop does not do"
            )
        if self._others() != self._beside:
            raise UserError(
                f"{type(self._scheduler).__name__} cycles the momentum, too, which RankZero's loop does not do: give "
                "it cycle_momentum=False"
            )
        self._factors.append(factors[0])

    def _others(self) -> list[Any]:
        return [[group.get(name) for name in CYCLED] for group in self._shadow.param_groups]


def undone(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with its initial learning rates, which making a scheduler changed."""
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr", group["lr"])
    return optimizer


def _pair(found: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(found, Optimizer):
        return [found], []
    if isinstance(found, Mapping):
        return [found["optimizer"]], [found["lr_scheduler"]] if "lr_scheduler" in found else []
    if isinstance(found, Sequence) and len(found) == 2 and isinstance(found[0], Sequence):
        return list(found[0]), list(found[1])
    if isinstance(found, Sequence) and found and isinstance(found[0], Mapping):
        return [optimizer for one in found for optimizer in _pair(one)[0]], []
    return (list(found), []) if isinstance(found, Sequence) else ([], [])


def _shadow(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of nothing, with the same groups' settings."""
    groups = [
        {
            **{name: value for name, value in group.items() if name != "params"},
            "params": [torch.zeros(1)],
        }
        for group in optimizer.param_groups
    ]
    return torch.optim.SGD(groups, lr=0.0)


def _rebind(scheduler: Any, old: Optimizer, new: Optimizer) -> None:
    """Let a scheduler, and those it is made of, change `new` instead of `old`."""
    if getattr(scheduler, "optimizer", None) is old:
        scheduler.optimizer = new
    for part in getattr(scheduler, "_schedulers", ()):
        _rebind(part, old, new)

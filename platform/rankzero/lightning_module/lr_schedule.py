"""The result of `configure_optimizers`: an optimizer, and a scheduler as a function of the step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rankzero.errors import UserError

_CYCLED = ("momentum", "betas")  # Some schedulers change these, too.


def optimizer_and_scheduler(found: Any) -> tuple[Optimizer, Any, str, int]:
    """Return (optimizer, scheduler or None, interval, frequency).

    `found`: the result of `configure_optimizers`. Raises UserError for what RankZero's loop does
    not do: several optimizers, none, or a scheduler that needs a metric.
    """
    optimizers, schedulers = _pair(found)
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise UserError(
            f"configure_optimizers returned {len(optimizers)} optimizers and {len(schedulers)} "
            "schedulers: RankZero's loop takes one optimizer and at most one scheduler"
        )
    if not schedulers:
        return optimizers[0], None, "step", 1
    settings = schedulers[0] if isinstance(schedulers[0], Mapping) else {"scheduler": schedulers[0]}
    scheduler = settings["scheduler"]
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UserError("ReduceLROnPlateau needs a metric: set train.schedule=plateau instead")
    interval, frequency = settings.get("interval", "epoch"), settings.get("frequency", 1)
    return optimizers[0], scheduler, interval, int(frequency)


class ReplayedScheduler:
    """A scheduler's factor on the initial learning rates, as a function of the optimizer's steps.

    RankZero's loop asks for the factor of any step, also after a resume, but a scheduler only moves
    forward. So the scheduler runs on a copy of its optimizer's groups, as far as needed, and the
    factors are kept. `every`: the optimizer's steps between two of the scheduler. Raises UserError
    for a scheduler that changes anything else.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler, every: int = 1) -> None:
        self._every = every
        self._rates = [group["initial_lr"] for group in optimizer.param_groups]
        # The copy has dummy parameters, and the settings of the same groups.
        copies = [{**group, "params": [torch.zeros(1)]} for group in optimizer.param_groups]
        self._shadow, self._scheduler = torch.optim.SGD(copies, lr=0.0), scheduler
        self._others_at_start = self._others()
        self._factors: list[list[float]] = []
        _rebind(scheduler, optimizer, self._shadow)
        self._record_factor()
        # One step finds out now, not in the middle of the training, what the scheduler changes.
        self.after(every)

    def after(self, step: int) -> list[float]:
        """Return each group's factor after a step of the optimizer."""
        count = step // self._every
        with warnings.catch_warnings():
            # PyTorch warns that optimizer.step() was not called before. On the copy, it never is.
            warnings.simplefilter("ignore")
            while len(self._factors) <= count:
                self._scheduler.step()
                self._record_factor()
        return self._factors[count]

    def _record_factor(self) -> None:
        groups = zip(self._shadow.param_groups, self._rates, strict=True)
        factors = [float(group["lr"]) / rate if rate else 1.0 for group, rate in groups]
        if self._others() != self._others_at_start:
            raise UserError(
                f"{type(self._scheduler).__name__} also cycles the momentum, which RankZero's loop "
                "does not do: pass cycle_momentum=False"
            )
        self._factors.append(factors)

    def _others(self) -> list[Any]:
        return [[group.get(name) for name in _CYCLED] for group in self._shadow.param_groups]


def _pair(found: Any) -> tuple[list[Any], list[Any]]:
    # Lightning accepts an optimizer, a dict, a list of either, and a list with its schedulers. A
    # single scheduler needs no list.
    if isinstance(found, Optimizer):
        return [found], []
    if isinstance(found, Mapping):
        return [found["optimizer"]], [found["lr_scheduler"]] if "lr_scheduler" in found else []
    if found is None:
        return [], []
    if not isinstance(found, Sequence):
        raise UserError(
            f"configure_optimizers returned a {type(found).__name__} where an optimizer belongs: "
            "return [optimizer], [scheduler]"
        )
    if len(found) == 2 and isinstance(found[0], Sequence):
        optimizers, schedulers = found
        several = isinstance(schedulers, Sequence)
        return list(optimizers), list(schedulers) if several else [schedulers]
    pairs = [_pair(one) for one in found]
    return [one for pair in pairs for one in pair[0]], [one for pair in pairs for one in pair[1]]


def _rebind(scheduler: Any, old: Optimizer, new: Optimizer) -> None:
    """Let a scheduler, and the schedulers it contains, change `new` instead of `old`."""
    # SequentialLR and ChainedScheduler have no public name for their parts.
    if getattr(scheduler, "optimizer", None) is old:
        scheduler.optimizer = new
    for part in getattr(scheduler, "_schedulers", ()):
        _rebind(part, old, new)

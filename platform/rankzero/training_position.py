"""`Progress`: where a training is, for `measure` and `schedule` with a parameter more. Pure.

def measure(self, model, batch, at):
    weight = min(1.0, at.step / 1000)
    teacher = at.helpers["teacher"]
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rankzero.errors import UserError


@dataclasses.dataclass(frozen=True)
class Progress:
    """The place of a `measure` or a `schedule` in its training. It is equal on all ranks."""

    step: int
    """Optimizer steps that are finished."""
    total_steps: int
    epoch: int
    """The epoch of the batch, from 0. In an evaluation: of the last step."""
    training: bool
    """False in an evaluation."""
    helpers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The modules that `Experiment.helpers` returns, on this rank's device."""
    turn: str | None = None
    """The name of the optimizer that steps; None without `Experiment.turns`."""


def takes_progress(method: Callable[..., Any], call: str = "measure(self, model, batch)") -> bool:
    """Return whether `method` has a third parameter: without a default, or called ``at``.

    `call`: how it is called with two. Raises UserError if it has another number.
    """
    signature = inspect.signature(method)
    named = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    # A default is for callers of the user's own, unless the parameter has the name of a Progress.
    takes = len(named) > 2 and (named[2].default is named[2].empty or named[2].name == "at")
    try:
        signature.bind(*range(3 if takes else 2))
    except TypeError:
        raise UserError(
            f"{call.partition('(')[0]} must be {call} or {call[:-1]}, at), "
            f"but its parameters are {signature}"
        ) from None
    return takes


def measure_at(measure: Callable[..., Any], at: Progress) -> Callable[[Any, Any], Any]:
    """Return `measure` as a function of a model and a batch, whether it takes `at` or not."""
    return bound(measure, at) if takes_progress(measure) else measure


def bound(measure: Callable[..., Any], at: Progress) -> Callable[[Any, Any], Any]:
    """Return `measure` as a function of a model and a batch, with `at` as its third argument."""
    return lambda model, batch: measure(model, batch, at)

"""The ranges of a search space: ``search = {"lr": LogUniform(1e-4, 1e-1)}``. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of the options, which have no order."""

    options: tuple[Any, ...]

    def __init__(self, *options: Any) -> None:
        object.__setattr__(self, "options", options)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """A real number between `low` and `high`."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class LogUniform:
    """A positive number between `low` and `high`, uniform in its logarithm."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Integer:
    """An integer from `low` to `high`, both included."""

    low: int
    high: int


Range = Choice | Uniform | LogUniform | Integer

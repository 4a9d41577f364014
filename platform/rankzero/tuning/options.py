"""The options of a search, and the names that they take. Pure."""

from __future__ import annotations

import dataclasses

from rankzero.tuning.objective import Name

SAMPLERS = ("tpe", "gp", "random", "grid")
PRUNERS = ("asha", "hyperband", "median", "none")


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """What a search looks for, and what it may spend."""

    objective: Name = "time-to-target"
    minutes: float | None = None
    trials: int | None = 20
    """All trials, the reference included."""
    tolerance: float = 0.01
    trial_minutes: float | None = None
    challengers: int = 3
    """How many of the best trials are confirmed."""
    seeds: int = 3
    silence_seconds: float = 300.0

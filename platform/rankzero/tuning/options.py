"""The options of a search, and the names that they take."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rankzero.mlflow_store.uris import require_plain
from rankzero.tuning.objective import Name

SAMPLERS = ("tpe", "gp", "random", "grid")
PRUNERS = ("asha", "hyperband", "median", "none")


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """What a search looks for, and what it may spend."""

    objective: Name = "time-to-target"
    sampler: str = "tpe"
    pruner: str = "asha"
    minutes: float | None = None
    trials: int | None = 20
    """All trials, the reference included."""
    tolerance: float = 0.01
    trial_minutes: float | None = None
    challengers: int = 3
    """How many of the best trials are confirmed."""
    seeds: int = 3
    silence_seconds: float = 300.0


def default_storage(root: Path) -> str:
    """Return the URL of the embedded database. Raises TrackingError for an unsuitable path."""
    path = root.absolute() / "studies.db"
    require_plain(path)
    return f"sqlite:///{path}"

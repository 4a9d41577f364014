"""The options of a search, and the names that they take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, get_args

from rankzero.mlflow_store.uris import require_plain
from rankzero.tuning.objective import Name

Sampler = Literal["tpe", "gp", "random", "grid"]
Pruner = Literal["asha", "hyperband", "median", "none"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
PRUNERS: tuple[Pruner, ...] = get_args(Pruner)


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """The objective of a search, and its budget."""

    objective: Name = "time-to-target"
    sampler: Sampler = "tpe"
    pruner: Pruner = "asha"
    minutes: float | None = None
    trials: int | None = 20
    """All trials, the reference included."""
    tolerance: float = 0.01
    trial_minutes: float | None = None
    challengers: int = 3
    """How many of the best trials are confirmed."""
    seeds: int = 3
    silence_seconds: float = 300.0
    price: float | None = None
    """One device for an hour costs this, in any currency."""


STUDIES = "studies.db"


def default_storage(root: Path) -> str:
    """Return the URL of the embedded database. Raises TrackingError for an unsuitable path."""
    path = root.absolute() / STUDIES
    require_plain(path)
    return f"sqlite:///{path}"

"""What happens in a run, and what a hook is. Pure.

Events are frozen facts; one line of JSON each in the run's journal. NaN and the infinities
are written as Python's json writes them (``NaN``, ``Infinity``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclasses.dataclass(frozen=True)
class RunStarted:
    """An attempt begins; `attempt` counts from 1, `step` is where it goes on from."""

    time: float
    params: Mapping[str, str]
    environment: Mapping[str, str]
    attempt: int
    step: int = 0
    total_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class StepsLogged:
    """Values of consecutive reports, in columns: ``metrics[name][i]`` belongs to ``steps[i]`` at ``times[i]``."""

    steps: Sequence[int]
    times: Sequence[float]
    metrics: Mapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The validation metrics after `step`; `best`: no earlier evaluation reached the goal metric's value."""

    time: float
    step: int
    metrics: Mapping[str, float]
    best: bool


@dataclasses.dataclass(frozen=True)
class CheckpointSaved:
    """A complete checkpoint lies in the folder `path`, relative to the run's folder."""

    time: float
    step: int
    path: str
    best: bool
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class CheckpointDeleted:
    """Retention removed the checkpoint of `step`; its bytes go from MLflow too."""

    time: float
    step: int
    path: str


@dataclasses.dataclass(frozen=True)
class SystemSampled:
    """Means over an interval of what one node's GPUs and host did; `sample` counts from 0."""

    time: float
    sample: int
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class RunEnded:
    """An attempt is over. `error` is the traceback of a failure, `metrics` the run's summary."""

    time: float
    status: Status
    reason: str
    error: str | None
    metrics: Mapping[str, float]


Event = RunStarted | StepsLogged | Evaluated | CheckpointSaved | CheckpointDeleted | SystemSampled | RunEnded
Hook = Callable[[Event], None]

_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (RunStarted, StepsLogged, Evaluated, CheckpointSaved, CheckpointDeleted, SystemSampled, RunEnded)
}


def encode(event: Event) -> str:
    """Return the event as one line of JSON, without the newline."""
    return json.dumps({"event": type(event).__name__, **vars(event)}, separators=(",", ":"))


def decode(line: str) -> Event:
    """Read what `encode` wrote. Raises ValueError for anything else."""
    try:
        fields = json.loads(line)
        event: Event = _TYPES[fields.pop("event")](**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an event: {line[:80]!r}") from error
    return event

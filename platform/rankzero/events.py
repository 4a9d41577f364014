"""The events of a run. Pure.

An event is a frozen fact, and one line of JSON in the run's journal. NaN and the infinities
are written as Python's json writes them (``NaN``, ``Infinity``).
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

Status = Literal["FINISHED", "FAILED", "KILLED"]
LATEST = 1e11  # seconds: the year 5138, later than any clock


@dataclasses.dataclass(frozen=True)
class RunStarted:
    """An attempt begins. `attempt` counts from 1, `step` is the step that it continues from."""

    time: float
    params: Mapping[str, str]
    environment: Mapping[str, str]
    attempt: int
    step: int = 0
    total_steps: int | None = None

    def abandons(self, step: int) -> bool:
        """Return whether the attempt continues from before this step. An own loop has no step."""
        return self.total_steps is not None and self.step < step


@dataclasses.dataclass(frozen=True)
class DataDescribed:
    """The data that a run trains on or is validated with. The same data have the same `digest`.

    `how` names what the digest covers. `columns` gives the parts of a sample by name, as far as
    known. `source` is the folder (`source_type` local) or the experiment's file (code).
    """

    time: float
    context: str
    name: str
    digest: str
    how: str
    source_type: str
    source: str
    samples: int
    columns: Mapping[str, str]

    @property
    def text(self) -> str:
        """The data in a line, for people."""
        return f"{self.name}, {self.samples:,} samples, digest {self.digest}"


@dataclasses.dataclass(frozen=True)
class StepsLogged:
    """Values of consecutive reports, in columns.

    ``metrics[name][i]`` belongs to ``steps[i]`` at ``times[i]``.
    """

    steps: Sequence[int]
    times: Sequence[float]
    metrics: Mapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The validation metrics after `step`. `best`: no earlier goal value was as good.

    Or, when the run has finished, the test metrics (``test/…``) of the checkpoint of `step`.
    """

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
    """Retention deleted the checkpoint of `step`. MLflow's copy is deleted too."""

    time: float
    step: int
    path: str


@dataclasses.dataclass(frozen=True)
class PicturesTaken:
    """The arrays for the pictures of `step` are in `path`, relative to the run's folder."""

    time: float
    step: int
    path: str


@dataclasses.dataclass(frozen=True)
class ParamsLogged:
    """Params that a program with its own loop adds after the start."""

    time: float
    params: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class TagsSet:
    """Tags that a program with its own loop sets."""

    time: float
    tags: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ArtifactLogged:
    """A file or folder lies in `path`, relative to the run's folder and below its artifacts."""

    time: float
    path: str


@dataclasses.dataclass(frozen=True)
class ModelLogged:
    """A model in MLflow's layout lies in the folder `path`, relative to the run's folder."""

    time: float
    step: int
    path: str
    name: str


@dataclasses.dataclass(frozen=True)
class SystemSampled:
    """Means over an interval of one node's GPU and host metrics. `sample` counts from 0."""

    time: float
    sample: int
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Noticed:
    """Something about the run that people should know: a metric lost, a checkpoint not written."""

    time: float
    text: str


@dataclasses.dataclass(frozen=True)
class RunEnded:
    """An attempt is over. `error` is the traceback of a failure, `metrics` the run's summary."""

    time: float
    status: Status
    reason: str
    error: str | None
    metrics: Mapping[str, float]


Event = (
    RunStarted
    | DataDescribed
    | StepsLogged
    | Evaluated
    | CheckpointSaved
    | CheckpointDeleted
    | PicturesTaken
    | ParamsLogged
    | TagsSet
    | ArtifactLogged
    | ModelLogged
    | SystemSampled
    | Noticed
    | RunEnded
)

_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Event)}


def encode(event: Event) -> str:
    """Return the event as one line of JSON, without the newline."""
    return json.dumps({"event": type(event).__name__, **vars(event)}, separators=(",", ":"))


def encode_line(event: Event) -> bytes:
    """Return the event as a line of a journal. Its last key is a CRC-32 of all before it."""
    text = encode(event)[:-1].encode()
    return text + b',"crc":"%08x"}\n' % zlib.crc32(text)


def decode(line: str) -> Event:
    """Read what `encode` or `encode_line` wrote. Raises ValueError for anything else.

    Metrics must be columns or values by name. Readers check the values themselves.
    """
    try:
        fields = json.loads(line)
        # Earlier versions wrote no checksums.
        if "crc" in fields:
            text, _, found = line.rstrip("\n").rpartition(',"crc":"')
            if found != f'{zlib.crc32(text.encode()):08x}"}}':
                raise ValueError(f"altered: {line[:80]!r}")
            del fields["crc"]
        event: Event = _TYPES[fields.pop("event")](**fields)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an event: {line[:80]!r}") from error
    if not _is_sound(event):
        raise ValueError(f"not an event: {line[:80]!r}")
    return event


_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("attempt", "step", "sample", "samples"), int),
    **dict.fromkeys(("params", "environment", "columns", "metrics", "tags"), dict),
    **dict.fromkeys(("steps", "times"), list),
    **dict.fromkeys(("context", "name", "digest", "how", "source_type", "source"), str),
    **dict.fromkeys(("path", "reason", "text", "status"), str),
    "time": int | float,
    "total_steps": int | None,
    "best": bool,
    "error": str | None,
}
"""The type of each event's fields of this name."""


def _is_sound(event: Event) -> bool:
    """Return whether the fields have their types, and values that no reader stumbles over.

    Raises UnicodeEncodeError, which is a ValueError, for a path that no file can have.
    """
    fields = vars(event)
    if not all(isinstance(value, _FIELDS[name]) for name, value in fields.items()):
        return False
    names = ("params", "environment", "columns", "tags")
    by_name = [fields[name] for name in names if name in fields]
    columns = event.metrics.values() if isinstance(event, StepsLogged) else ()
    return (
        all(isinstance(text, str) for texts in by_name for text in texts.values())
        and all(isinstance(column, list) for column in columns)
        and -LATEST < fields.get("time", 0) < LATEST
        and fields.get("status", "FAILED") in get_args(Status)
        and b"\0" not in fields.get("path", "").encode("utf-8", "surrogateescape")
    )

"""One run in short, from its attempts' starts and its newest events: what lists show and filter."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args

from rankzero.catalog import attempts
from rankzero.catalog.attempts import Attempts, time_of
from rankzero.config.renamed import params_with_new_names
from rankzero.events import Evaluated, Event, RunEnded, RunStarted, Status, StepsLogged, decode
from rankzero.metric_names import SPEED, WHOLE_RUN
from rankzero.run_store import delivery_state, removal, run_locks, symlinks
from rankzero.run_store.folder import RunFolder
from rankzero.scalars import number, numbers

# The status of a run of which this disk has only a helping node's part.
ELSEWHERE = "ELSEWHERE"
# From a run's folder to its first process, on a busy machine.
STARTING_SECONDS = 120.0
_TAIL_BYTES, _MAX_TAIL_BYTES = 1 << 12, 1 << 20
_WHOLE = f"{WHOLE_RUN}/"
_INTERVAL = f"{_WHOLE}samples_per_second_half_width"
# Metrics that the loop logs with each report, besides those of `measure`.
_LOOP_METRICS = 4


class Details(NamedTuple):
    """The larger part of a summary. A list of thousands of runs needs it for few of them."""

    params: Mapping[str, str]
    metrics: Mapping[str, float]
    """The newest values, and the results of the whole run below whole_run/."""
    tags: Mapping[str, str]
    """The user's tags."""


class Summary(NamedTuple):
    """A run as a list has it."""

    path: str
    """Its folder. A list of thousands of runs needs few of them as a `RunFolder`."""
    details: Callable[[], Details]
    name: str
    experiment: str
    # FINISHED, FAILED, KILLED, STARTING, RUNNING, or DIED if the writer is gone without an end.
    status: str
    # Why it ended. Empty while it runs.
    reason: str
    started: float
    # The time of all its attempts, without that between two of them.
    seconds: float
    goal: str
    # The goal metric's best value.
    best: float | None
    samples_per_second: float | None
    undelivered: bool
    # The study that a trial belongs to.
    parent: str | None
    mlflow_run_id: str | None
    # The digest of the training data: the same for the same data.
    data: str | None
    mlflow_name: str | None = None
    """Its name in the embedded store, which a user may change; up to date in `lookup.listed`."""
    bytes: int = 0
    """The size of its folder; in `lookup.listed` with those of its children."""
    parent_mlflow_name: str | None = None
    """The parent's name in the embedded store; up to date in `lookup.listed`."""

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(Path(self.path))

    @property
    def shown_name(self) -> str:
        """The name in MLflow, if there is one. It may hold any characters."""
        return self.mlflow_name or self.name

    @property
    def ended(self) -> bool:
        """Whether the journal has the run's end."""
        return self.status in _ENDS

    @property
    def lives(self) -> bool:
        """Whether its processes run, or are about to."""
        return self.status in ("RUNNING", "STARTING")

    @property
    def params(self) -> Mapping[str, str]:
        return self.details().params

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.details().metrics

    @property
    def tags(self) -> Mapping[str, str]:
        return self.details().tags

    def fields(self) -> dict[str, Any]:
        """Return everything but the folder as plain values."""
        head = dict(zip(self._fields[2:], self.to_row(), strict=True))
        return {**head, **self.details()._asdict()}

    def to_row(self) -> tuple[Any, ...]:
        """Return everything but the folder and the details, for `from_row`."""
        return self[2:]


# In the order of the fields from `name` on.
_KINDS: tuple[tuple[type, ...], ...] = (
    *[(str,)] * 4,
    *[(int, float)] * 2,
    (str,),
    *[(int, float, NoneType)] * 2,
    (bool,),
    *[(str, NoneType)] * 4,
    (int,),
    (str, NoneType),
)
_ENDS = get_args(Status)


def from_row(path: str, details: Callable[[], Details], row: Sequence[Any]) -> Summary | None:
    """Return the summary of an ended run from `Summary.to_row`, or None if it is no such row.

    The row may be of another version, or somebody else's.
    """
    if not _are_kinds(tuple(map(type, row))):
        return None
    run = Summary._make((path, details, *row))
    return run if run.ended else None


# Few combinations occur, and each takes longer to check than to look up.
@functools.lru_cache(64)
def _are_kinds(found: tuple[type, ...]) -> bool:
    pairs = zip(found, _KINDS, strict=False)
    return len(found) == len(_KINDS) and all(one in kinds for one, kinds in pairs)


def details_from_line(line: str) -> Details | None:
    """Return the details from their line, or None if the line is damaged."""
    try:
        params, metrics, tags = json.loads(line)
        types = set(map(type, (*params.values(), *tags.values())))
        if types <= {str} and set(map(type, metrics.values())) <= {int, float}:
            return Details(params_with_new_names(params), metrics, tags)
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    return None


def read_summary(folder: RunFolder) -> Summary:
    """Return the run in short. Raises InvalidRunFolder if the folder holds no run."""
    symlinks.refuse(folder.path)
    identity = folder.identity
    begun, events = attempts.read(folder.events), newest_events(folder.events)
    ended, first = last_end(events), begun.first
    started = first.time if first else (folder.path / "run.json").stat().st_mtime
    since = begun.newest.time if begun.newest else started
    metrics = _newest_values(events)
    details = Details(begun.params, metrics, begun.tags)
    # An attempt that only evaluated has no speed of its own.
    results = ended.metrics if ended else {}
    delivery = delivery_state.load(delivery_state.path_of(folder, 0))
    offsets = {folder.events.name: 0, **delivery.cursor.offsets}
    return Summary(
        path=str(folder.path),
        details=lambda: details,
        name=identity.name,
        experiment=identity.experiment,
        status=ended.status if ended else _status_without_end(folder),
        reason=ended.reason if ended else "",
        started=started,
        seconds=begun.seconds_before + max([0.0, *(time_of(one) - since for one in events[-1:])]),
        goal=begun.goal[0],
        best=_best_of(begun, delivery.curves),
        samples_per_second=number(results.get("samples_per_second", metrics.get(SPEED))),
        undelivered=bool(delivery.queue.awaited)
        or delivery_state.unread_bytes(folder, offsets) > 0
        or bool(delivery_state.late_nodes(folder))
        or folder.late_model.exists(),
        parent=identity.parent,
        mlflow_run_id=delivery.run_id or identity.mlflow_run_id,
        data=begun.data,
        bytes=removal.size([folder.path]),
    )


def _status_without_end(folder: RunFolder) -> str:
    if run_locks.writer_lives(folder):
        return "RUNNING" if folder.events.exists() else "STARTING"
    if folder.is_elsewhere:
        return ELSEWHERE
    age = time.time() - run_locks.last_heartbeat(folder)
    return "STARTING" if not run_locks.is_known(folder) and age <= STARTING_SECONDS else "DIED"


def last_end(events: Iterable[Event]) -> RunEnded | None:
    """Return the newest attempt's end, or None if it has none."""
    end: RunEnded | None = None
    for event in events:
        if isinstance(event, (RunStarted, RunEnded)):
            end = event if isinstance(event, RunEnded) else None
    return end


def newest_events(path: Path, max_bytes: int = _MAX_TAIL_BYTES) -> list[Event]:
    """Return a journal's newest events, with an evaluation and a whole report."""
    try:
        with path.open("rb") as file:
            size, span = os.fstat(file.fileno()).st_size, _TAIL_BYTES
            while True:
                file.seek(max(0, size - span))
                events, complete = _until_complete(file.read().splitlines())
                if complete or span >= size or (span >= max_bytes and events):
                    return events
                span *= 4
    except FileNotFoundError:
        return []


def _until_complete(lines: Sequence[bytes]) -> tuple[list[Event], bool]:
    """Return the events of the lines, and whether they hold an evaluation and a whole report."""
    found: list[Event] = []
    logged: set[str] = set()  # by a report, which may be several events of the same step
    evaluated, complete, ended = False, False, None
    newest_step: int | None = None
    for line in reversed(lines):
        event = _decoded(line)
        # The first line is cut, and the last may be torn.
        if event is None:
            continue
        step = _step(event)
        # Decoding a line takes longer than reading it, and the older events are not needed.
        if ended and complete and step is not None and newest_step not in (None, step):
            break
        found.append(event)
        newest_step = step if newest_step is None else newest_step
        if isinstance(event, StepsLogged):
            logged.update(event.metrics)
        elif isinstance(event, (RunStarted, RunEnded)) and ended is None:
            ended = isinstance(event, RunEnded)
        evaluated = evaluated or isinstance(event, Evaluated)
        complete = evaluated and SPEED in logged and len(logged) > _LOOP_METRICS
    return found[::-1], complete


def _decoded(line: bytes) -> Event | None:
    try:
        return decode(line.decode(errors="replace"))
    except ValueError:
        return None


def _step(event: Event) -> int | None:
    if isinstance(event, StepsLogged):
        return event.steps[-1] if event.steps else None
    return event.step if isinstance(event, Evaluated) else None


def _newest_values(events: Iterable[Event]) -> dict[str, float]:
    found: dict[str, Any] = {}
    for event in events:
        if isinstance(event, StepsLogged):
            found |= {key: column[-1] for key, column in event.metrics.items() if column}
        elif isinstance(event, Evaluated):
            found |= event.metrics
        elif isinstance(event, RunEnded):
            if "samples_per_second" in event.metrics:
                # A short attempt has no interval. That of an earlier one does not fit its speed.
                found.pop(_INTERVAL, None)
            for key, value in event.metrics.items():
                found[key if "/" in key else _WHOLE + key] = value
    return numbers(found)


def _best_of(begun: Attempts, delivered: delivery_state.Curves) -> float | None:
    """Return the goal's best value in the journal, or the one that MLflow has, or None."""
    if begun.best is not None:
        return begun.best
    # MLflow's may be of an earlier goal.
    same = begun.of_goal is begun.first or delivered.goal == begun.goal[0]
    return delivered.best if same else None

"""The runs on this disk, out of their journals: found by name or by MLflow id, listed without reading them whole."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from rankzero.errors import UserError
from rankzero.events import Evaluated, Event, RunEnded, RunStarted, StepsLogged, decode
from rankzero.experiment import Goal
from rankzero.tracking import incumbent, legal, names, report
from rankzero.tracking import progress as delivery
from rankzero.tracking.journal import RunFolder, read, read_all

TAIL_BYTES = 1 << 16
STARTING_SECONDS = 120.0  # from a run's folder to its first process, on a busy machine


@dataclasses.dataclass(frozen=True)
class Listed:
    """One run as a list shows it."""

    folder: RunFolder
    name: str
    experiment: str
    status: str
    """FINISHED, FAILED, KILLED, STARTING, RUNNING; DIED where the writer is gone without a word."""
    started: float
    goal: str
    best: float | None
    samples_per_second: float | None
    undelivered: bool
    parent: str | None = None
    """The study that a trial belongs to."""


def folders(runs: Path) -> list[RunFolder]:
    """Return every run's folder."""
    return [RunFolder(path.parent) for path in runs.glob("*/run.json")]


def find(runs: Path, name_or_id: str) -> RunFolder | None:
    """Return the folder of the run with this name or MLflow run id; None where it is not on this disk."""
    if not names.is_plain(name_or_id):
        return None
    by_name = RunFolder(runs / name_or_id)
    if (by_name.path / "run.json").exists():
        return by_name
    return next((folder for folder in folders(runs) if mlflow_id(folder) == name_or_id), None)


def require(runs: Path, name_or_id: str) -> RunFolder:
    """Return the run's folder. Raises UserError, naming the newest runs, where there is none."""
    found = find(runs, name_or_id)
    if found is None:
        newest = [run.name for run in listed(runs)[:3]]
        known = f"the newest are {', '.join(newest)}" if newest else f"there are no runs in {runs}"
        raise UserError(f"no run is called {names.shown(name_or_id)}; {known}")
    return found


def mlflow_id(folder: RunFolder) -> str | None:
    """Return the run's id in MLflow, once it is there."""
    with contextlib.suppress(names.BrokenRun):
        return delivery.load(delivery.path_of(folder, 0)).run_id or folder.identity.mlflow_run_id
    return None


def listed(runs: Path) -> list[Listed]:
    """Return all runs, the newest first."""
    found = [_listed(folder) for folder in folders(runs)]
    return sorted((run for run in found if run is not None), key=lambda run: -run.started)


def last_end(folder: RunFolder) -> RunEnded | None:
    """Return how the newest attempt ended; None where it runs, or did not say."""
    for event in reversed(_tail(folder.events)):
        if isinstance(event, RunEnded):
            return event
        if isinstance(event, RunStarted):
            return None
    return None


def best_so_far(folder: RunFolder, goal: Goal) -> float | None:
    """Return the best value of the goal's metric that the run's earlier attempts reached."""
    best: float | None = None
    for event in read_all(folder.events):
        value = event.metrics.get(goal.metric) if isinstance(event, Evaluated) else None
        if value is not None and goal.better(value, best):
            best = value
    return best


def _listed(folder: RunFolder) -> Listed | None:
    try:
        identity = folder.identity
    except names.BrokenRun:
        return None
    head, tail = read(folder.events, 0, 1)[0], _tail(folder.events)
    started = next((event for event in head if isinstance(event, RunStarted)), None)
    ended = last_end(folder)
    params: Mapping[str, str] = started.params if started else {}
    goal = params.get("goal.metric", "")
    state = delivery.load(delivery.path_of(folder, 0))
    return Listed(
        folder=folder,
        name=identity.name,
        experiment=identity.experiment,
        status=ended.status if ended else _unended(folder),
        started=started.time if started else (folder.path / "run.json").stat().st_mtime,
        goal=goal,
        best=legal.number(ended.metrics.get("best")) if ended else _latest_goal(tail, goal),
        samples_per_second=legal.number(ended.metrics.get("samples_per_second")) if ended else _latest_speed(tail),
        undelivered=delivery.unread_bytes(folder, {folder.events.name: 0, **state.offsets}) > 0,
        parent=identity.parent,
    )


def _unended(folder: RunFolder) -> str:
    if incumbent.writer_lives(folder):
        return "RUNNING"
    begun = folder.events.exists() or time.time() - incumbent.beat(folder) > STARTING_SECONDS
    return "DIED" if begun else "STARTING"


def _tail(path: Path) -> list[Event]:
    """Return the events in the file's last bytes; more of them where one line is longer than that."""
    size = path.stat().st_size if path.exists() else 0
    events: list[Event] = []
    span = TAIL_BYTES
    while not events and size:
        with path.open("rb") as file:
            file.seek(max(0, size - span))
            lines = file.read().decode(errors="replace").splitlines()
        events = [event for event in map(_decoded, lines) if event is not None]
        if span >= size:
            break
        span *= 8
    return events


def _decoded(line: str) -> Event | None:
    try:
        return decode(line)
    except ValueError:
        return None


def _latest_goal(events: list[Event], goal: str) -> float | None:
    found = (
        event.metrics[goal] for event in reversed(events) if isinstance(event, Evaluated) and goal in event.metrics
    )
    return legal.number(next(found, None))


def _latest_speed(events: list[Event]) -> float | None:
    columns = (event.metrics.get(report.SPEED) for event in reversed(events) if isinstance(event, StepsLogged))
    return next((legal.number(column[-1]) for column in columns if column), None)

"""One run in short, out of the two ends of its journal: what lists of runs show, filter and sort by."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, get_args

from rankzero.config.renamed import params_with_new_names
from rankzero.events import Evaluated, Event, RunEnded, RunStarted, Status, StepsLogged, decode
from rankzero.experiment import Goal
from rankzero.metric_names import SPEED, WHOLE_RUN
from rankzero.run_store import claims, symlinks
from rankzero.run_store import delivery_state as delivery
from rankzero.run_store.folder import RunFolder
from rankzero.scalars import number, numbers

TAIL_BYTES, LONGEST_TAIL_BYTES = 1 << 12, 1 << 20
TRAINING_DATA = "rankzero.data.training"
"""The tag with the digest of the data that a run trains on."""
OF_A_REPORT = 4  # keys that the loop logs with each report, besides those of `measure`

ELSEWHERE = "ELSEWHERE"
"""The status of a run of which only a helping machine's part is here: another's disk knows."""
STARTING_SECONDS = 120.0  # from a run's folder to its first process, on a busy machine


@dataclasses.dataclass(frozen=True)
class Summary:
    """A run as a list has it."""

    folder: RunFolder
    name: str
    experiment: str
    status: str
    """FINISHED, FAILED, KILLED, STARTING, RUNNING; DIED where the writer is gone without a word."""
    reason: str
    """How it ended; empty while it runs."""
    started: float
    seconds: float
    """From its first start to its newest word."""
    goal: str
    best: float | None
    """The goal metric's best value; of a run that goes on, the newest that is known to be one."""
    samples_per_second: float | None
    undelivered: bool
    parent: str | None
    """The study that a trial belongs to."""
    mlflow_run_id: str | None
    data: str | None
    """The digest of what it trains on: the same for the same data."""
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    """The newest values, and what the whole run comes to below ``whole_run/``."""

    @property
    def ended(self) -> bool:
        """Tell whether the run says itself how it ended."""
        return self.status in get_args(Status)

    def fields(self) -> dict[str, Any]:
        """Return everything but the folder, in plain values."""
        return {name: value for name, value in vars(self).items() if name != "folder"}


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "experiment", "status", "reason", "goal"), (str,)),
    **dict.fromkeys(("parent", "mlflow_run_id", "data"), (str, NoneType)),
    **dict.fromkeys(("started", "seconds"), (int, float)),
    **dict.fromkeys(("best", "samples_per_second"), (int, float, NoneType)),
    **dict.fromkeys(("params", "metrics"), (dict,)),
    "undelivered": (bool,),
}


def are_sound(fields: Mapping[str, Any]) -> bool:
    """Tell whether these are the `fields` of a run that has ended, whoever wrote them down."""
    return (
        fields.keys() == _KINDS.keys()
        and all(isinstance(value, _KINDS[key]) for key, value in fields.items())
        and fields["status"] in get_args(Status)
        and set(map(type, fields["params"].values())) <= {str}
        and set(map(type, fields["metrics"].values())) <= {int, float}
    )


def read_summary(folder: RunFolder) -> Summary:
    """Return the run in short. Raises BrokenRun where the folder holds no run."""
    symlinks.refuse(folder.path)
    identity = folder.identity
    started, events = _ends(folder.events)
    ended = last_end(events)
    params = started.params if started else {}
    begun = started.time if started else (folder.path / "run.json").stat().st_mtime
    goal, metrics = params.get("goal.metric", ""), _newest(events)
    told = ended.metrics if ended else {}  # an attempt that only evaluated has no speed of its own
    seen = delivery.glance(delivery.path_of(folder, 0))
    return Summary(
        folder=folder,
        name=identity.name,
        experiment=identity.experiment,
        status=ended.status if ended else _unended(folder),
        reason=ended.reason if ended else "",
        started=begun,
        seconds=max([0.0, *(_time(event) - begun for event in events[-1:])]),
        goal=goal,
        best=number(ended.metrics.get("best"))
        if ended
        else _best(events, goal, params.get("goal.mode", "min")),
        samples_per_second=number(told.get("samples_per_second", metrics.get(SPEED))),
        undelivered=seen.waits
        or delivery.unread_bytes(folder, {folder.events.name: 0, **seen.offsets}) > 0,
        parent=identity.parent,
        mlflow_run_id=seen.run_id or identity.mlflow_run_id,
        data=started.environment.get(TRAINING_DATA) if started else None,
        params=params_with_new_names(params),
        metrics=metrics,
    )


def _unended(folder: RunFolder) -> str:
    begun = folder.events.exists()
    if claims.writer_lives(folder):
        return "RUNNING" if begun else "STARTING"
    if folder.is_elsewhere:
        return ELSEWHERE
    expected = (
        not claims.is_known(folder)
        and time.time() - claims.last_heartbeat(folder) <= STARTING_SECONDS
    )
    return "STARTING" if expected else "DIED"


def tail(path: Path) -> list[Event]:
    """Return the newest events, out of the file's last bytes: as many as it takes to see an evaluation and a step."""
    return _ends(path)[1]


def _ends(path: Path) -> tuple[RunStarted | None, list[Event]]:
    """Return how the journal begins, and its `tail`; of thousands, opening a file twice is felt."""
    try:
        with path.open("rb") as file:
            first = _decoded_from_the_end([file.readline(LONGEST_TAIL_BYTES)])
            return next((event for event in first if isinstance(event, RunStarted)), None), _tail(
                file
            )
    except FileNotFoundError:
        return None, []


def _tail(file: BinaryIO) -> list[Event]:
    size, span = os.fstat(file.fileno()).st_size, TAIL_BYTES
    while True:
        file.seek(max(0, size - span))
        events = _decoded_from_the_end(file.read().splitlines())
        if span >= size or (span >= LONGEST_TAIL_BYTES and events) or _tells_all(events):
            return events
        span *= 4


def last_end(events: Iterable[Event]) -> RunEnded | None:
    """Return how the newest attempt ended; None where it runs, or did not say."""
    found: RunEnded | None = None
    for event in events:
        if isinstance(event, (RunStarted, RunEnded)):
            found = event if isinstance(event, RunEnded) else None
    return found


def _decoded_from_the_end(lines: Sequence[bytes]) -> list[Event]:
    """Return the events, oldest first; of a run that has ended, from the last whole report on, if that tells all."""
    found: list[Event] = []
    told = _TailScan()
    for line in reversed(lines):
        try:
            event = decode(line.decode(errors="replace"))
        except ValueError:
            continue  # the first line is cut, the last may be torn
        if told.ended and told.all and told.is_newer_than(event):
            break
        found.append(event)
        told.add(event)
    return found[::-1]


def _tells_all(events: Sequence[Event]) -> bool:
    told = _TailScan()
    for event in reversed(events):
        told.add(event)
    return told.all


class _TailScan:
    """What is known of a run when its newest events, in this order, have been read."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._evaluated = False
        self._step: int | None = None
        self.ended: bool | None = None
        """Whether it has; None: nothing says so yet."""

    def add(self, event: Event) -> None:
        if self._step is None:
            self._step = _step(event)
        if isinstance(event, StepsLogged):
            self._logged.update(event.metrics)
        elif isinstance(event, Evaluated):
            self._evaluated = True
        elif isinstance(event, (RunStarted, RunEnded)) and self.ended is None:
            self.ended = isinstance(event, RunEnded)

    @property
    def all(self) -> bool:
        """Tell whether that is an evaluation, the speed, and what a step logs."""
        return self._evaluated and SPEED in self._logged and len(self._logged) > OF_A_REPORT

    def is_newer_than(self, event: Event) -> bool:
        """Tell whether the event belongs to an older report: decoding one costs more than reading it."""
        step = _step(event)
        return step is not None and self._step not in (None, step)


def _step(event: Event) -> int | None:
    if isinstance(event, StepsLogged):
        return event.steps[-1] if event.steps else None
    return event.step if isinstance(event, Evaluated) else None


def _newest(events: Iterable[Event]) -> dict[str, float]:
    found: dict[str, Any] = {}
    for event in events:
        match event:
            case StepsLogged():
                found |= {key: column[-1] for key, column in event.metrics.items() if column}
            case Evaluated():
                found |= event.metrics
            case RunEnded():
                found |= {
                    key if "/" in key else f"{WHOLE_RUN}/{key}": value
                    for key, value in event.metrics.items()
                }
            case _:
                pass
    return numbers(found)


def _best(events: Iterable[Event], goal: str, mode: str) -> float | None:
    judge = Goal(mode="max" if mode == "max" else "min")
    best: float | None = None
    for event in events:
        value = number(event.metrics.get(goal)) if isinstance(event, Evaluated) else None
        if value is not None and (event.best or judge.better(value, best)):  # type: ignore[union-attr]
            best = value
    return best


def _time(event: Event) -> float:
    return (
        (number((event.times or [0.0])[-1]) or 0.0)
        if isinstance(event, StepsLogged)
        else event.time
    )

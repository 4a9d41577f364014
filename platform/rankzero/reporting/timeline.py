"""The events of a run as lines with a time each: attempts, evaluations, silences, ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rankzero import scalars
from rankzero.catalog.summary import time_of
from rankzero.events import (
    LATEST,
    CheckpointSaved,
    Evaluated,
    Event,
    Noticed,
    RunEnded,
    RunStarted,
    StepsLogged,
    SystemSampled,
)

# Evaluations or checkpoints of an attempt: the first and the last of them.
_MAX_OF_A_KIND = 8
_LONGEST_SILENCE = 60.0


class Line(NamedTuple):
    """One event; `grave`: what a reader looks for first."""

    time: float
    text: str
    grave: bool = False


@dataclasses.dataclass
class _Attempt:
    """The attempt so far."""

    last_step: int = 0
    last_time: float | None = None
    goal: str = ""
    many: dict[str, list[Line]] = dataclasses.field(default_factory=dict)
    """Lines by kind, of which only some are shown."""


def lines(events: Iterable[Event]) -> list[Line]:
    """Return the lines of a journal, by their time."""
    found: list[Line] = []
    attempt = _Attempt()
    for event in events:
        # Without a time, a line has no place among the others. Samples come every second.
        moment = time_of(event)
        if not 0 < moment < LATEST or isinstance(event, SystemSampled):
            continue
        if isinstance(event, RunStarted):
            # Between two attempts, a silence is no sign of a problem: so `last_time` is None.
            found += _shortened(attempt)
            attempt = _Attempt(event.step, None, event.params.get("goal.metric", ""))
        found += _silence(attempt, moment)
        attempt.last_time = moment
        found += _of_event(event, attempt)
    return sorted([*found, *_shortened(attempt)], key=lambda line: line.time)


def _of_event(event: Event, attempt: _Attempt) -> Iterator[Line]:
    match event:
        case RunStarted():
            total = f" of {event.total_steps:,}" if event.total_steps else ""
            host = event.environment.get("rankzero.host", "")
            where = f" on {host}" if host else ""
            text = f"attempt {event.attempt} began at step {event.step:,}{total}{where}"
            yield Line(event.time, text)
        case StepsLogged():
            steps = (scalars.step(step) or 0 for step in event.steps[-1:])
            attempt.last_step = max([attempt.last_step, *steps])
        case Evaluated():
            values = {key: scalars.number(value) for key, value in event.metrics.items()}
            # Without the goal metric, any value is better than none.
            name = attempt.goal if attempt.goal in values else next(iter(values), "no metric")
            shown = "" if (value := values.get(name)) is None else f" {value:.4g}"
            best = ", the best so far" if event.best else ""
            text = f"evaluation at step {event.step:,}: {name}{shown}{best}"
            attempt.many.setdefault("evaluations", []).append(Line(event.time, text))
        case CheckpointSaved():
            best = ", the best so far" if event.best else ""
            text = f"checkpoint of step {event.step:,} saved{best}"
            attempt.many.setdefault("checkpoints", []).append(Line(event.time, text))
        case Noticed():
            yield Line(event.time, f"note: {event.text}", grave=True)
        case RunEnded():
            text = f"{event.status} at step {attempt.last_step:,}: {event.reason}"
            yield Line(event.time, text, grave=event.status != "FINISHED")
        case _:
            pass


def _shortened(attempt: _Attempt) -> Iterator[Line]:
    """Yield the first and the last lines of each kind."""
    for kind, found in attempt.many.items():
        left_out, half = len(found) - _MAX_OF_A_KIND, _MAX_OF_A_KIND // 2
        if left_out <= 0:
            yield from found
            continue
        yield from found[:half]
        yield Line(found[half].time, f"… {left_out:,} more {kind} …")
        yield from found[-half:]


def _silence(attempt: _Attempt, moment: float) -> Iterator[Line]:
    """Yield a line if rank 0 wrote nothing for long, or if the clock went backwards."""
    if attempt.last_time is None:
        return
    minutes = (moment - attempt.last_time) / 60
    if minutes * 60 > _LONGEST_SILENCE:
        text = f"nothing was written for {minutes:.1f} min after step {attempt.last_step:,}"
        yield Line(attempt.last_time, text, grave=True)
    elif minutes * 60 < -_LONGEST_SILENCE:
        yield Line(moment, f"the clock went back by {-minutes:.1f} min", grave=True)

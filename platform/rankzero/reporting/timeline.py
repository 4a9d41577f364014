"""The events of a run as lines with a time each: attempts, evaluations, silences, ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rankzero import scalars
from rankzero.catalog.attempts import time_of
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
from rankzero.run_store import provenance

# Evaluations or checkpoints of an attempt: the first and the last of them.
_MAX_OF_A_KIND = 8
_MANY: dict[type, str] = {Evaluated: "evaluations", CheckpointSaved: "checkpoints"}
_LONGEST_SILENCE = 60.0
_BEST = ", the best so far"


class Line(NamedTuple):
    """One event; `grave`: what a reader looks for first."""

    time: float
    text: str
    grave: bool = False


def lines(events: Iterable[Event]) -> list[Line]:
    """Return the lines of a journal, by their time."""
    found: list[Line] = []
    many: dict[str, list[Line]] = {}  # of this attempt, by kind: only some are shown
    before: float | None = None
    step, goal = 0, ""
    for event in events:
        # Without a time, a line has no place among the others. Samples come every second.
        moment = time_of(event)
        if not 0 < moment < LATEST or isinstance(event, SystemSampled):
            continue
        if isinstance(event, RunStarted):
            found += _shortened(many)
            many, step, goal = {}, event.step, event.params.get("goal.metric", "")
        # Between two attempts, a silence is no sign of a problem.
        elif before is not None:
            found += _silence(before, moment, step)
        before = moment
        if isinstance(event, StepsLogged):
            step = max([step, *(scalars.step(number) or 0 for number in event.steps[-1:])])
        elif text := _text(event, step, goal):
            failed = isinstance(event, RunEnded) and event.status != "FINISHED"
            line = Line(moment, text, grave=failed or isinstance(event, Noticed))
            kind = _MANY.get(type(event))
            (many.setdefault(kind, []) if kind else found).append(line)
    return sorted([*found, *_shortened(many)], key=lambda line: line.time)


def _text(event: Event, step: int, goal: str) -> str:
    """Return an event in words; `step`: the newest so far. Empty for what has no line."""
    match event:
        case RunStarted():
            total = f" of {event.total_steps:,}" if event.total_steps else ""
            host = event.environment.get("rankzero.host", "")
            where = f" on {host}" if host else ""
            # An own loop begins before it loads its checkpoint.
            own = provenance.OWN_LOOP in event.environment
            at = "" if own else f" at step {event.step:,}"
            return f"attempt {event.attempt} began{at}{total}{where}"
        case Evaluated():
            # Without the goal metric, any value is better than none.
            name = goal if goal in event.metrics else next(iter(event.metrics), "no metric")
            value = scalars.number(event.metrics.get(name))
            shown = "" if value is None else f" {scalars.shown(value)}"
            return f"evaluation at step {event.step:,}: {name}{shown}{_BEST if event.best else ''}"
        case CheckpointSaved():
            return f"checkpoint of step {event.step:,} saved{_BEST if event.best else ''}"
        case Noticed():
            return f"note: {event.text}"
        case RunEnded():
            return f"{event.status} at step {step:,}: {event.reason}"
        case _:
            return ""


def _shortened(many: Mapping[str, Sequence[Line]]) -> Iterator[Line]:
    """Yield the first and the last lines of each kind."""
    half = _MAX_OF_A_KIND // 2
    for kind, found in many.items():
        if len(found) <= _MAX_OF_A_KIND:
            yield from found
            continue
        yield from found[:half]
        yield Line(found[half].time, f"… {len(found) - _MAX_OF_A_KIND:,} more {kind} …")
        yield from found[-half:]


def _silence(before: float, moment: float, step: int) -> Iterator[Line]:
    """Yield a line if rank 0 wrote nothing for long, or if the clock went backwards."""
    minutes = (moment - before) / 60
    if minutes * 60 > _LONGEST_SILENCE:
        text = f"nothing was written for {minutes:.1f} min after step {step:,}"
        yield Line(before, text, grave=True)
    elif minutes * 60 < -_LONGEST_SILENCE:
        yield Line(moment, f"the clock went back by {-minutes:.1f} min", grave=True)

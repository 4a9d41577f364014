"""What happened to a run, in lines with a time each, out of its journal. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rankzero import scalars
from rankzero.events import (
    LATEST,
    CheckpointDeleted,
    CheckpointSaved,
    DataDescribed,
    Evaluated,
    Event,
    Noticed,
    PicturesTaken,
    RunEnded,
    RunStarted,
    StepsLogged,
    SystemSampled,
)

MOST_OF_A_KIND = 8  # evaluations, checkpoints: the first and the last of an attempt
LONGEST_SILENCE = 60.0


class Line(NamedTuple):
    """Something that happened; `grave`: what people look for first."""

    time: float
    text: str
    grave: bool = False


@dataclasses.dataclass
class _Attempt:
    """What is known of the attempt so far."""

    first_step: int = 0
    last_step: int = 0
    last_time: float | None = None
    goal: str = ""
    many: dict[str, list[Line]] = dataclasses.field(default_factory=dict)


def tell(events: Iterable[Event]) -> list[Line]:
    """Return what happened, in the journal's order: attempts, evaluations, checkpoints, notices, silences, ends."""
    told: list[Line] = []
    attempt = _Attempt()
    for event in events:
        moment = _time_of(event)
        if moment is None or isinstance(event, SystemSampled):
            continue
        if isinstance(event, RunStarted):
            told += _summed_up(attempt)
            attempt = _Attempt(event.step, event.step, None, event.params.get("goal.metric", ""))
        told += _silence(attempt, moment)
        attempt.last_time = moment
        told += _lines(event, attempt)
    return sorted([*told, *_summed_up(attempt)], key=lambda line: line.time)


def _lines(event: Event, attempt: _Attempt) -> Iterator[Line]:
    match event:
        case RunStarted():
            total = f" of {event.total_steps:,}" if event.total_steps else ""
            where = event.environment.get("rankzero.host", "")
            yield Line(
                event.time,
                f"attempt {event.attempt} began at step {event.step:,}{total}{where and ' on ' + where}",
            )
        case StepsLogged():
            attempt.last_step = max(
                [attempt.last_step, *(scalars.step(step) or 0 for step in event.steps[-1:])]
            )
        case Evaluated():
            _remember(attempt, "evaluations", Line(event.time, _evaluation(event, attempt.goal)))
        case CheckpointSaved():
            best = ", the best so far" if event.best else ""
            _remember(
                attempt,
                "checkpoints",
                Line(event.time, f"checkpoint of step {event.step:,} saved{best}"),
            )
        case CheckpointDeleted():
            pass  # retention at work
        case Noticed():
            yield Line(event.time, f"note: {event.text}", grave=True)
        case RunEnded():
            yield Line(
                event.time,
                f"{event.status} at step {attempt.last_step:,}: {event.reason}",
                event.status != "FINISHED",
            )
        case DataDescribed() | PicturesTaken() | SystemSampled():
            pass


def _evaluation(event: Evaluated, goal: str) -> str:
    values: Mapping[str, float | None] = {
        name: scalars.number(value) for name, value in event.metrics.items()
    }
    shown = values.get(goal, next(iter(values.values()), None))
    name = goal if goal in values else next(iter(values), "no metric")
    says = "" if shown is None else f" {shown:.4g}"
    return f"evaluation at step {event.step:,}: {name}{says}{', the best so far' if event.best else ''}"


def _remember(attempt: _Attempt, kind: str, line: Line) -> None:
    attempt.many.setdefault(kind, []).append(line)


def _summed_up(attempt: _Attempt) -> Iterator[Line]:
    for kind, lines in attempt.many.items():
        left_out = len(lines) - MOST_OF_A_KIND
        if left_out <= 0:
            yield from lines
            continue
        half = MOST_OF_A_KIND // 2
        yield from lines[:half]
        yield Line(lines[half].time, f"… {left_out:,} more {kind} …")
        yield from lines[-half:]


def _silence(attempt: _Attempt, moment: float) -> Iterator[Line]:
    """Yield a line where rank 0 said nothing for long, or the clock went backwards."""
    if attempt.last_time is None:
        return
    passed = moment - attempt.last_time
    if passed > LONGEST_SILENCE:
        yield Line(
            attempt.last_time,
            f"nothing was written for {passed / 60:.1f} min after step {attempt.last_step:,}",
            True,
        )
    elif passed < -LONGEST_SILENCE:
        yield Line(moment, f"the clock went back by {-passed / 60:.1f} min", True)


def _time_of(event: Event) -> float | None:
    if isinstance(event, StepsLogged):
        moments = [
            moment
            for moment in map(scalars.number, event.times[-1:])
            if moment and abs(moment) < LATEST
        ]
        return moments[0] if moments else None
    return event.time

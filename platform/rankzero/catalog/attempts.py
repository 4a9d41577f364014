"""The attempts of a run: their settings, goals and tags, from anywhere in its journal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from rankzero.config.renamed import params_with_new_names
from rankzero.events import (
    Evaluated,
    Event,
    ParamsLogged,
    RunEnded,
    RunStarted,
    StepsLogged,
    TagsSet,
)
from rankzero.run_store.journal import milestones
from rankzero.run_store.provenance import OWN_LOOP, tags_of_user
from rankzero.scalars import number

# The tag with the digest of the training data.
_TRAINING_DATA = "rankzero.data.training"


@dataclasses.dataclass
class Attempts:
    """The attempts of a run so far."""

    params: dict[str, str] = dataclasses.field(default_factory=dict)
    """Those of the newest attempt, and those that a program with its own loop has logged."""
    tags: dict[str, str] = dataclasses.field(default_factory=dict)
    """The user's tags, of all attempts: a resume that names none takes none back."""
    data: str | None = None
    """The digest of the newest attempt's training data."""
    seconds_before: float = 0.0
    """The time of the attempts before the newest."""
    last_time: float = 0.0
    """The time of the newest event that was read."""
    first: RunStarted | None = None
    newest: RunStarted | None = None
    of_goal: RunStarted | None = None
    """The first attempt with the newest one's goal, and without another goal in between."""
    bests: list[tuple[int, float | None]] = dataclasses.field(default_factory=list)
    """The step and the value of each best evaluation of the newest goal, the newest last."""

    @property
    def goal(self) -> tuple[str, str]:
        """The metric and the mode of the newest attempt's goal."""
        return self.params.get("goal.metric", ""), self.params.get("goal.mode", "min")

    @property
    def best(self) -> float | None:
        """The best value of the newest goal in this journal."""
        return self.bests[-1][1] if self.bests else None


def read(events: Path) -> Attempts:
    """Return the attempts in a journal."""
    found = Attempts()
    for event in milestones(events):
        match event:
            case RunStarted():
                _begin(found, event)
            case ParamsLogged():
                found.params |= event.params
            case TagsSet():
                found.tags |= tags_of_user(event.tags)
            case Evaluated(best=True):
                found.bests.append((event.step, number(event.metrics.get(found.goal[0]))))
            case RunEnded():
                step, known = found.bests[-1] if found.bests else (0, None)
                found.bests.append((step, number(event.metrics.get("best", known))))
        found.last_time = time_of(event)
    return found


def params_after(params: Mapping[str, str], start: RunStarted) -> dict[str, str]:
    """Return a run's params after another start.

    A program with its own loop takes none back: it may continue a run without its config.
    """
    kept = params if OWN_LOOP in start.environment else {}
    return {**kept, **params_with_new_names(start.params)}


def _begin(found: Attempts, start: RunStarted) -> None:
    if found.newest is not None:
        found.seconds_before += max(0.0, found.last_time - found.newest.time)
    before = found.goal
    found.params = params_after(found.params, start)
    found.tags |= tags_of_user(start.environment)
    # An attempt that failed in `data` describes none.
    found.data = start.environment.get(_TRAINING_DATA, found.data)
    found.first, found.newest = found.first or start, start
    if found.of_goal is None or found.goal != before:
        found.of_goal, found.bests = start, []
    found.bests = [one for one in found.bests if not start.abandons(one[0])]


def time_of(event: Event) -> float:
    """Return an event's time, of several steps the newest; 0 if it is none."""
    if isinstance(event, StepsLogged):
        return number((event.times or [0.0])[-1]) or 0.0
    return event.time

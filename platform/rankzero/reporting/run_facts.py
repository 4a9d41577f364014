"""What the journals say of a run, folded into the few facts that its report and comparisons show. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from rankzero import scalars
from rankzero.config.renamed import params_with_new_names
from rankzero.events import (
    CheckpointDeleted,
    CheckpointSaved,
    DataDescribed,
    Evaluated,
    Event,
    Noticed,
    RunEnded,
    RunStarted,
    StepsLogged,
    SystemSampled,
)
from rankzero.experiment import Goal
from rankzero.metric_names import SPEED
from rankzero.scalars import number, numbers

COMMAND = "rankzero.command"
_GPU = re.compile(r"system/(?:node_\d+/)?gpu_\d+_(.+)")


@dataclasses.dataclass
class Facts:
    """A run so far."""

    goal: Goal = dataclasses.field(default_factory=Goal)
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    commands: list[str] = dataclasses.field(default_factory=list)
    """What was typed, one for each attempt, without repeating itself."""
    attempts: int = 0
    seconds: float = 0.0
    started: float | None = None
    last_time: float = 0.0
    steps: int = 0
    total_steps: int | None = None
    evaluations: int = 0
    best: float | None = None
    best_step: int = 0
    best_metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    speed: float | None = None
    checkpoints: dict[int, bool] = dataclasses.field(default_factory=dict)
    gpu_sums: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)
    notices: list[str] = dataclasses.field(default_factory=list)
    data: dict[str, DataDescribed] = dataclasses.field(default_factory=dict)
    """By what they are used for: training, validation."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """The newest value of each; those of the system are not among them."""
    end: RunEnded | None = None
    """How the newest attempt ended; None while it goes on."""

    @property
    def gpu_means(self) -> dict[str, float]:
        """Return the means over time and GPUs: ``utilization_percentage`` and the like."""
        return {name: total / count for name, (total, count) in self.gpu_sums.items()}

    @property
    def duration(self) -> float:
        """Return the seconds of all attempts."""
        running = 0.0 if self.started is None else max(0.0, self.last_time - self.started)
        return self.seconds + running

    @property
    def samples_per_second(self) -> float | None:
        """Return the steady speed, or the newest where there is none yet."""
        steady = number(self.end.metrics.get("samples_per_second")) if self.end else None
        return steady or self.speed


def fold(events: Iterable[Event]) -> Facts:
    """Return the facts of a run from all of its events; those of the system's journals may come after the others."""
    facts = Facts()
    for event in events:
        _fold_one(facts, event)
    return facts


def _fold_one(facts: Facts, event: Event) -> None:
    match event:
        case RunStarted():
            _start(facts, event)
        case StepsLogged():
            _steps(facts, event)
        case Evaluated():
            _evaluation(facts, event)
        case CheckpointSaved():
            if event.best:
                facts.checkpoints = dict.fromkeys(facts.checkpoints, False)
            facts.checkpoints[event.step] = event.best
        case CheckpointDeleted():
            facts.checkpoints.pop(event.step, None)
        case SystemSampled():
            _system(facts, event)
        case DataDescribed():
            facts.data[event.context] = event
        case Noticed():
            facts.notices.append(event.text)
        case RunEnded():
            _elapse(facts, event.time)
            facts.end = event
            facts.metrics |= numbers(
                {key: value for key, value in event.metrics.items() if "/" in key}
            )


def _start(facts: Facts, event: RunStarted) -> None:
    if facts.started is not None:
        facts.seconds += max(0.0, facts.last_time - facts.started)
    facts.started = facts.last_time = event.time
    facts.attempts = event.attempt
    facts.params, facts.environment, facts.total_steps = (
        params_with_new_names(event.params),
        event.environment,
        event.total_steps,
    )
    facts.goal, facts.end = goal_of(event.params) or facts.goal, None
    command = event.environment.get(COMMAND)
    if command and command not in facts.commands:
        facts.commands.append(command)


def _steps(facts: Facts, event: StepsLogged) -> None:
    facts.steps = max([facts.steps, *(scalars.step(number) or 0 for number in event.steps[-1:])])
    for moment in event.times[-1:]:
        _elapse(facts, number(moment) or 0.0)
    facts.metrics |= numbers({key: column[-1] for key, column in event.metrics.items() if column})
    facts.speed = facts.metrics.get(SPEED)


def _evaluation(facts: Facts, event: Evaluated) -> None:
    _elapse(facts, event.time)
    facts.evaluations += 1
    facts.metrics |= numbers(event.metrics)
    facts.steps = max(facts.steps, event.step)
    value = number(event.metrics.get(facts.goal.metric))
    if value is not None and facts.goal.better(value, facts.best):
        facts.best, facts.best_step, facts.best_metrics = value, event.step, event.metrics


def _system(facts: Facts, event: SystemSampled) -> None:
    for key, value in event.metrics.items():
        gpu = _GPU.fullmatch(key)
        real = number(value)
        if gpu and real is not None:
            total, count = facts.gpu_sums.get(gpu[1], (0.0, 0))
            facts.gpu_sums[gpu[1]] = total + real, count + 1


def _elapse(facts: Facts, at: float) -> None:
    facts.last_time = max(facts.last_time, at)


def goal_of(params: Mapping[str, str]) -> Goal | None:
    """Return the goal in a run's params, or None if there is none."""
    target = number(params.get("goal.target"))
    try:
        return Goal(params["goal.metric"], params["goal.mode"], target)  # type: ignore[arg-type]
    except (KeyError, ValueError):
        return None

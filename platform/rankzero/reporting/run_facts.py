"""The few facts of a run that its report shows, folded from its events; what limited its speed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from rankzero import scalars
from rankzero.catalog.attempts import params_after
from rankzero.events import (
    CheckpointDeleted,
    CheckpointSaved,
    DataDescribed,
    Evaluated,
    Event,
    Noticed,
    ParamsLogged,
    RunEnded,
    RunStarted,
    StepsLogged,
    SystemSampled,
    TagsSet,
)
from rankzero.experiment import Goal
from rankzero.mlflow_store.items import DESCRIPTION
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.provenance import OWN_LOOP, tags_of_user
from rankzero.scalars import number, numbers

_COMMAND = "rankzero.command"
# Without the energy, which is a counter and has no mean.
_GPU = re.compile(r"system/(?:node_\d+/)?gpu_\d+_(.+)(?<!_joules)")
# The share of the training time from which waiting for data limits the speed.
_DATA_BOUND = 0.1
# Percent. Below it, a GPU waits for something else than data: launches or communication.
_BUSY_GPU = 70.0


@dataclasses.dataclass
class Facts:
    """The facts of a run so far."""

    goal: Goal = dataclasses.field(default_factory=Goal)
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tags: dict[str, str] = dataclasses.field(default_factory=dict)
    """The user's tags, of all attempts."""
    note: str = ""
    """The user's text of ``--note``."""
    every_command: list[tuple[str, bool, int | None]] = dataclasses.field(default_factory=list)
    """Each attempt's command line, and whether the attempt before ended at its time limit.

    Also the step that it continues from, if the attempt before was interrupted.
    """
    attempts: int = 0
    seconds: float = 0.0
    """The time of the attempts before the newest."""
    started: float | None = None
    last_time: float = 0.0
    steps: int = 0
    total_steps: int | None = None
    bests: list[tuple[int, Mapping[str, float]]] = dataclasses.field(default_factory=list)
    """The step and the metrics of each evaluation that was the best, the newest last."""
    tested: Evaluated | None = None
    """The newest evaluation of the test sets."""
    checkpoints: dict[int, bool] = dataclasses.field(default_factory=dict)
    """Step -> whether it is the best."""
    gpu_sums: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Each reading times its seconds, and the seconds."""
    sampled: float = math.inf
    notices: list[str] = dataclasses.field(default_factory=list)
    data: dict[str, DataDescribed] = dataclasses.field(default_factory=dict)
    """By their use: training, validation."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """The value of each metric at its highest step, as in MLflow, without the system metrics."""
    metric_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    end: RunEnded | None = None
    """The newest attempt's end."""

    @property
    def best_step(self) -> int:
        """The step of the goal's best value, or 0."""
        return self.bests[-1][0] if self.bests else 0

    @property
    def best_metrics(self) -> Mapping[str, float]:
        """All metrics at that step."""
        return self.bests[-1][1] if self.bests else {}

    @property
    def best(self) -> float | None:
        """The goal's best value of the weights that the run still has, or None."""
        return number(self.best_metrics.get(self.goal.metric))

    @property
    def result(self) -> float | None:
        """The goal's best value, or the mean of a repeat, which has no evaluation of its own."""
        figures = self.end.metrics if self.end else {}
        return number(figures.get("best")) if self.best is None else self.best

    @property
    def steps_text(self) -> str:
        """Return the steps of all attempts for people: ``176 of 500``."""
        return f"{self.steps:,}" + (f" of {self.total_steps:,}" if self.total_steps else "")

    @property
    def gpu_means(self) -> dict[str, float]:
        """The means over time and GPUs: ``utilization_percentage`` and others."""
        return {name: total / seconds for name, (total, seconds) in self.gpu_sums.items()}

    @property
    def duration(self) -> float:
        """The seconds of all attempts."""
        running = 0.0 if self.started is None else max(0.0, self.last_time - self.started)
        return self.seconds + running


def facts_of(folder: RunFolder) -> Facts:
    """Return the facts of a run so far."""
    # Few commands need it, and it imports eight modules.
    from rankzero.run_store import checkpoint_files

    facts = fold(folder.all_events())
    # An attempt on another machine may have the best value, and its journal is there.
    for path, saved in checkpoint_files.known(folder.checkpoints).items():
        value = saved.metrics.get(facts.goal.metric)
        is_other = (path / checkpoint_files.DOWNLOADED).exists()
        if value is not None and is_other and facts.goal.better(value, facts.best):
            facts.bests.append((saved.step, saved.metrics))
    return facts


def fold(events: Iterable[Event]) -> Facts:
    """Return the facts of a run. The events of the system journals may come last."""
    facts = Facts()
    for event in events:
        take(facts, event)
    return facts


def take(facts: Facts, event: Event) -> None:
    """Add an event to the facts."""
    match event:
        case RunStarted():
            _start(facts, event)
        case StepsLogged():
            _steps(facts, event)
        case Evaluated():
            _evaluation(facts, event)
        case CheckpointSaved(step=step, best=best):
            # A new best checkpoint takes the former one's place.
            former = {key: was and not best for key, was in facts.checkpoints.items()}
            facts.checkpoints = {**former, step: best}
        case CheckpointDeleted():
            facts.checkpoints.pop(event.step, None)
        case SystemSampled():
            _system(facts, event)
        case DataDescribed():
            facts.data[event.context] = event
        case ParamsLogged() | TagsSet():
            _addition(facts, event)
        case Noticed():
            facts.notices.append(event.text)
        case RunEnded():
            facts.last_time, facts.end = max(facts.last_time, event.time), event
            # Results without a slash are of the whole run, and no metric's newest value. The others
            # repeat the last evaluation, which may be of a lower step than an earlier one.
            known = facts.metric_steps
            new = {k: v for k, v in event.metrics.items() if "/" in k and k not in known}
            facts.metrics |= numbers(new)


def goal_of(params: Mapping[str, str]) -> Goal | None:
    """Return the goal that a run's params describe, or None if they do not."""
    target = number(params.get("goal.target"))
    try:
        return Goal(params["goal.metric"], params["goal.mode"], target)  # type: ignore[arg-type]
    except (KeyError, ValueError):
        return None


def is_limited(facts: Facts) -> bool:
    """Return whether the run may have finished by its time limit, with steps left to train."""
    limit = facts.params.get("train.limits.max_minutes", "none")
    return limit != "none" and not (facts.total_steps and facts.steps >= facts.total_steps)


def limited_by(facts: Facts, wait: float) -> str:
    """Return what limited the speed, as far as the metrics of every run show it."""
    busy = facts.gpu_means.get("utilization_percentage")
    if wait >= _DATA_BOUND:
        return "data: load faster (`train.workers`), or keep the data set in memory"
    if busy is not None and busy < _BUSY_GPU:
        return (
            "neither data nor arithmetic: `rankzero profile` shows whether it is communication "
            "or small steps"
        )
    # Ranks that wait for each other keep a GPU busy, so its utilization does not show it.
    if facts.params.get("world_size", "1") == "1":
        return "compute"
    return "compute or communication: `rankzero profile` shows which"


def straggler(metrics: Mapping[str, float]) -> str | None:
    """Return which rank held up the others, by a run's results, or None."""
    rank = number(metrics.get("straggler_rank"))
    ratio = number(metrics.get("straggler_forward_ratio"))
    wait = number(metrics.get("straggler_data_wait_fraction"))
    if rank is None:
        return None
    did = (
        f"waits for its data {wait:.0%} of the time"
        if wait
        else f"computes {ratio or 1:.1f}x as long as the others"
    )
    return f"rank {rank:.0f} {did}"


def _start(facts: Facts, event: RunStarted) -> None:
    # The time between two attempts does not count: nothing was trained.
    if facts.started is not None:
        facts.seconds += max(0.0, facts.last_time - facts.started)
    has_finished = facts.end is not None and facts.end.status == "FINISHED"
    at_limit = has_finished and is_limited(facts)
    # One that failed in set-up has no step.
    interrupted = None if has_finished or not facts.attempts else event.step or None
    facts.started = facts.last_time = event.time
    facts.attempts, facts.total_steps = event.attempt, event.total_steps
    facts.params, facts.environment = params_after(facts.params, event), event.environment
    facts.tags |= tags_of_user(event.environment)
    facts.note = facts.note or event.environment.get(DESCRIPTION, "")
    goal, facts.end = goal_of(event.params) or facts.goal, None
    is_same = (goal.metric, goal.mode) == (facts.goal.metric, facts.goal.mode)
    # A return to an older checkpoint, or to the beginning, abandons what was better later.
    facts.bests = [one for one in facts.bests if is_same and not event.abandons(one[0])]
    facts.goal = goal
    if _repeats(command := event.environment.get(_COMMAND, ""), event):
        facts.every_command.append((command, at_limit, interrupted))


def _repeats(command: str, event: RunStarted) -> bool:
    """Return whether the command belongs to those that repeat the run."""
    # Settings of a resume that ended in set-up are not kept. An own loop's words are its own.
    if event.total_steps is None and " resume " in command and OWN_LOOP not in event.environment:
        return False
    # A notebook does not know its own name.
    return bool(command) and "kernel_launcher" not in command


def _addition(facts: Facts, event: ParamsLogged | TagsSet) -> None:
    if isinstance(event, TagsSet):
        facts.tags |= tags_of_user(event.tags)
    else:
        facts.params = {**facts.params, **event.params}


def _steps(facts: Facts, event: StepsLogged) -> None:
    # A report's columns may be empty, and a foreign writer's steps may be no integers.
    facts.steps = max([facts.steps, *(scalars.step(step) or 0 for step in event.steps[-1:])])
    for moment in event.times[-1:]:
        facts.last_time = max(facts.last_time, number(moment) or 0.0)
    steps = [scalars.step(step) or 0 for step in event.steps]
    highest = max(range(len(steps)), key=steps.__getitem__, default=0)
    for key, column in event.metrics.items():
        at = min(highest, len(column) - 1, len(steps) - 1)
        if at >= 0:
            _take_value(facts, key, steps[at], column[at])


def _take_value(facts: Facts, key: str, step: object, value: object) -> None:
    """Take a value, unless the metric has one at a higher step."""
    real, at = number(value), scalars.step(step) or 0
    if real is not None and at >= facts.metric_steps.get(key, at):
        facts.metrics[key], facts.metric_steps[key] = real, at


def _system(facts: Facts, event: SystemSampled) -> None:
    # A sample is the mean of 1 to 10 s. Another node's first one, or a clock, may lie before.
    seconds, facts.sampled = min(max(event.time - facts.sampled, 1.0), 10.0), event.time
    for key, value in event.metrics.items():
        gpu, real = _GPU.fullmatch(key), number(value)
        if gpu and real is not None:
            total, before = facts.gpu_sums.get(gpu[1], (0.0, 0.0))
            facts.gpu_sums[gpu[1]] = total + real * seconds, before + seconds


def _evaluation(facts: Facts, event: Evaluated) -> None:
    facts.last_time = max(facts.last_time, event.time)
    for key, raw in event.metrics.items():
        _take_value(facts, key, event.step, raw)
    facts.steps = max(facts.steps, event.step)
    if any(name.startswith("test/") for name in event.metrics):
        facts.tested = event
    if event.best and number(event.metrics.get(facts.goal.metric)) is not None:
        facts.bests.append((event.step, event.metrics))

"""A run's description for its MLflow page: what happened, in Markdown. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rankzero.events import (
    CheckpointDeleted,
    CheckpointSaved,
    Evaluated,
    Event,
    Noticed,
    RunEnded,
    RunStarted,
    StepsLogged,
    SystemSampled,
)
from rankzero.experiment import Goal
from rankzero.tracking import legal
from rankzero.tracking.legal import number

SPEED = "throughput/samples_per_second"
HIGHLIGHTS = ("train.batch_size", "train.micro_batch", "train.precision", "train.epochs", "train.steps", "train.seed")
ERROR_LINES = 25
MOST_NOTES = 30
GAP = "&nbsp;\n\n"  # MLflow's page puts headings right below what is above
_GPU = re.compile(r"system/(?:node_\d+/)?gpu_\d+_(.+)")


@dataclasses.dataclass
class Facts:
    """What the journals say, folded into the few numbers that the report shows."""

    goal: Goal = dataclasses.field(default_factory=Goal)
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
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


def fold(events: Iterable[Event]) -> Facts:
    """Return the facts of a run from all of its events; those of the system's journals may come after the others."""
    facts = Facts()
    for event in events:
        _fold_one(facts, event)
    return facts


def markdown(name: str, facts: Facts, end: RunEnded, trouble: Sequence[str] = ()) -> str:
    """Return the report. `name` is what `rankzero resume` takes, `trouble` what the delivery had."""
    parts = [
        _headline(end),
        _lead(facts, end),
        _results(facts, end),
        _error(end),
        _checkpoints(name, facts, end),
        _notes("What went wrong on the way", facts.notices),
        _notes("Delivery to MLflow", trouble),
        _setting(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


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
        case Noticed():
            facts.notices.append(event.text)
        case RunEnded():
            _elapse(facts, event.time)


def _start(facts: Facts, event: RunStarted) -> None:
    if facts.started is not None:
        facts.seconds += max(0.0, facts.last_time - facts.started)
    facts.started = facts.last_time = event.time
    facts.attempts = event.attempt
    facts.params, facts.environment, facts.total_steps = event.params, event.environment, event.total_steps
    facts.goal = _goal(event.params) or facts.goal


def _steps(facts: Facts, event: StepsLogged) -> None:
    facts.steps = max([facts.steps, *(legal.step(number) or 0 for number in event.steps[-1:])])
    for moment in event.times[-1:]:
        _elapse(facts, number(moment) or 0.0)
    for speed in (event.metrics.get(SPEED) or [])[-1:]:
        facts.speed = number(speed) or facts.speed


def _evaluation(facts: Facts, event: Evaluated) -> None:
    _elapse(facts, event.time)
    facts.evaluations += 1
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


def _goal(params: Mapping[str, str]) -> Goal | None:
    target = number(params.get("goal.target"))
    try:
        return Goal(params["goal.metric"], params["goal.mode"], target)  # type: ignore[arg-type]
    except (KeyError, ValueError):
        return None


def _headline(end: RunEnded) -> str:
    return f"### {end.status}: {_inline(end.reason)}"


def _lead(facts: Facts, end: RunEnded) -> str:
    """Return the line that MLflow shows before "Show more"."""
    parts = []
    if facts.best is not None:
        parts.append(f"`{facts.goal.metric}` **{_number(facts.best)}**")
    parts += [
        f"{value} steps" if title == "Steps" else value
        for title, value in (*_speed_rows(facts, end), *_progress_rows(facts))
        if title != "Waiting for data"
    ]
    return " · ".join(parts)


def _results(facts: Facts, end: RunEnded) -> str:
    rows = [*_goal_rows(facts), *_progress_rows(facts), *_speed_rows(facts, end), *_gpu_rows(facts)]
    if not rows:
        return ""
    return _table(("Result", ""), rows)


def _goal_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    goal = facts.goal
    if facts.best is None:
        return
    yield f"Best `{goal.metric}` ({goal.mode})", f"**{_number(facts.best)}** at step {facts.best_step:,}"
    if goal.target is not None:
        verdict = "reached" if goal.reached(facts.best) else "not reached"
        yield f"Target {_number(goal.target)}", f"**{verdict}**"
    for key, value in facts.best_metrics.items():
        if key != goal.metric:
            yield f"`{key}` at that step", _number(value)


def _progress_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    total = f" of {facts.total_steps:,}" if facts.total_steps else ""
    if facts.steps:
        yield "Steps", f"{facts.steps:,}{total}"
    if facts.started is not None:
        again = f" in {facts.attempts} attempts" if facts.attempts > 1 else ""
        yield "Duration", _duration(facts.seconds + max(0.0, facts.last_time - facts.started)) + again


def _speed_rows(facts: Facts, end: RunEnded) -> Iterator[tuple[str, str]]:
    speed = number(end.metrics.get("samples_per_second")) or facts.speed
    if speed:
        half = number(end.metrics.get("samples_per_second_half_width"))
        yield "Throughput", f"**{_number(speed)}**{f' ± {_number(half)}' if half else ''} samples/s"
    wait = number(end.metrics.get("data_wait_fraction"))
    if wait is not None:
        yield "Waiting for data", f"{wait:.1%} of the training time"
    slowest = straggler(end.metrics)
    if slowest:
        yield "Slowest rank", slowest


def straggler(metrics: Mapping[str, float]) -> str | None:
    """Say which rank kept the others waiting, by a run's summary; None where none did."""
    rank, ratio = number(metrics.get("straggler_rank")), number(metrics.get("straggler_forward_ratio"))
    wait = number(metrics.get("straggler_data_wait_fraction"))
    if rank is None:
        return None
    did = f"waits for its data {wait:.0%} of the time" if wait else f"computes {ratio or 1:.1f}x as long as the others"
    return f"rank {rank:.0f} {did}"


def _gpu_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    names = {
        "utilization_percentage": ("GPU busy, mean", "%"),
        "memory_usage_percentage": ("GPU memory, mean", "%"),
        "power_usage_watts": ("GPU power, mean", "W"),
    }
    for key, (title, unit) in names.items():
        if key in facts.gpu_sums:
            total, count = facts.gpu_sums[key]
            yield title, f"{_number(total / count)} {unit}"


def _error(end: RunEnded) -> str:
    if not end.error:
        return ""
    lines = end.error.rstrip().splitlines()
    cut = ["…"] if len(lines) > ERROR_LINES else []
    body = "\n".join([*cut, *lines[-ERROR_LINES:]]).replace("```", "'''")
    return f"{GAP}### Error\n\n```text\n{body}\n```"


def _checkpoints(name: str, facts: Facts, end: RunEnded) -> str:
    steps = sorted(facts.checkpoints)
    if not steps:
        return ""
    listed = ", ".join(f"{step:,}" + (" (best)" if facts.checkpoints[step] else "") for step in steps)
    finished, epochs = end.status == "FINISHED", facts.params.get("train.epochs", "")
    verb = "Go on" if finished else "Resume"
    further = f" train.epochs={2 * int(epochs)}" if finished and epochs.isdecimal() else ""
    command = f"```sh\nrankzero resume {name}{further}\n```"
    return f"{GAP}### Checkpoints\n\nSteps {listed}. {verb} from the latest:\n\n{command}"


def _notes(heading: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    shown = [f"- {_inline(line).removeprefix('- ')}" for line in lines[:MOST_NOTES]]
    more = [f"- and {len(lines) - MOST_NOTES} more"] if len(lines) > MOST_NOTES else []
    return f"{GAP}### {heading}\n\n" + "\n".join([*shown, *more])


def _setting(facts: Facts) -> str:
    params = facts.params
    own = [key for key in params if "." not in key]
    rows = [
        (f"`{key}`", f"`{_inline(params[key])}`")
        for key in (*own, *HIGHLIGHTS)
        if key in params and params[key] != "none"
    ]
    return GAP + "### Setting\n\n" + _table(("Setting", "Value"), rows) if rows else ""


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    # The em spaces keep the columns apart: MLflow's page gives tables no padding.
    body = (f"| {left}&emsp;&emsp; | {right} |" for left, right in rows)
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *body])


def _inline(text: str) -> str:
    """Return the text on one line, so that no value of the user's breaks the page."""
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'").replace("<", "‹")


def _number(value: float | None) -> str:
    real = number(value)
    if real is None or real != real:
        return "not a number"
    if abs(real) >= 1000:
        return f"{real:,.0f}"
    return f"{real:.4g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"

"""The steps and values of a run's metrics: one value per metric and step, and the goal's best."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rankzero.events import CheckpointSaved, Evaluated, Event, RunStarted, StepsLogged
from rankzero.experiment import Goal
from rankzero.integrations.own_loop.values import Tell, shown, to_float
from rankzero.run_store import provenance
from rankzero.run_store.checkpoint_files import Manifest

Row = tuple[Any, float, Mapping[str, Any]]  # step, time, values by name


# Beyond these, the oldest are forgotten: irregular steps must not fill the memory.
_MOST = 1_000


class _Series:
    """The steps at which a metric has a value, and the value of the highest one.

    Steps at one distance are one range, so that a metric which only goes forward needs no memory.
    """

    __slots__ = ("_back", "_first", "_gap", "_ranges", "step", "time", "value")

    def __init__(self, step: int, value: float, moment: float) -> None:
        self.step, self.value, self.time = step, value, moment
        self._first, self._gap = step, 0
        self._ranges: list[range] = []
        self._back: set[int] = set()

    def append(self, step: int, value: float, moment: float) -> None:
        """Add a step above all others."""
        gap = step - self.step
        if gap != self._gap:
            if self._gap:  # A range has ended, and another begins.
                self._ranges.append(self._newest_range())
                self._first, gap = step, 0
            self._gap = gap
            if len(self._ranges) > _MOST:
                del self._ranges[: _MOST // 2]
        self.step, self.value, self.time = step, value, moment

    def insert(self, step: int) -> None:
        """Add a step below the highest one."""
        if len(self._back) >= _MOST:
            self._back.clear()
        self._back.add(step)

    def __contains__(self, step: int) -> bool:
        if step in self._newest_range() or step in self._back:
            return True
        index = bisect_right(self._ranges, step, key=lambda steps: steps[0])
        return index > 0 and step in self._ranges[index - 1]

    def _newest_range(self) -> range:
        return range(self._first, self.step + 1, self._gap or 1)


class MetricHistory:
    """The metrics of one attempt, and what it has to know of earlier ones. For one thread.

    `tell`: gets what is odd, with a key under which it is said once.
    """

    def __init__(self, goal: Goal, attempt: int, tell: Tell) -> None:
        self._goal, self._attempt, self._tell = goal, attempt, tell
        self.step = 0
        """The newest step so far."""
        self.judges_rows = False
        """Whether a row's value of the goal's metric is an evaluation."""
        self.is_continued = False
        """Whether the attempt continues from a checkpoint."""
        self.best: float | None = None
        self.last: dict[str, float] = {}
        """The metrics of the last evaluation."""
        self._best_step = self._floor = 0
        self._bests: list[tuple[int, float]] = []
        self._series: dict[str, _Series] = {}
        self._new: list[tuple[int, float, dict[str, float]]] = []
        self._judgements: list[Evaluated] = []
        self._earlier: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        """The steps from which metrics count on: that of a checkpoint may be another count."""
        self._at_checkpoints: dict[int, dict[str, int]] = {}
        self._evaluations: dict[int, tuple[dict[str, float], float]] = {}
        """The metrics and the time of each evaluation, by step."""
        self._judged: dict[bool, int] = {}
        """The steps of the newest checkpoint (True) and of the newest evaluation alone (False)."""

    @property
    def highest(self) -> int:
        """The highest step so far, of earlier attempts too."""
        steps = (series.step for series in self._series.values())
        return max([self.step, *self._earlier.values(), *steps])

    def recall(self, events: Iterable[Event]) -> None:
        """Take the newest steps, and the best value under this goal, from earlier attempts."""
        notes_checkpoints = True
        for event in events:
            if isinstance(event, RunStarted):
                notes_checkpoints = provenance.KEEP in event.environment
            if isinstance(event, CheckpointSaved) and not notes_checkpoints:
                # An older version has logged no more of it, and this when it was written.
                self._note_checkpoint([event.step])
            if isinstance(event, StepsLogged):
                if not event.metrics:
                    self._note_checkpoint(event.steps)
                highest = dict.fromkeys(event.metrics, max(event.steps, default=0))
            elif isinstance(event, Evaluated):
                highest = dict.fromkeys(event.metrics, event.step)
                self._recall_goal(event.metrics.get(self._goal.metric), event.step)
            else:
                continue
            for name, step in highest.items():
                self._earlier[name] = max(step, self._earlier.get(name, step))
                self.step = max(step, self.step)
        self._floor, self._counted = self.step, dict(self._earlier)

    def _recall_goal(self, value: float | None, step: int) -> None:
        """Note a value of the goal, and in `_bests` each one that was the best of its branch."""
        if value is None:  # Another call for the step may have it.
            return
        if self._goal.better(value, self.best):
            self.best, self._best_step = value, step
        while self._bests and self._bests[-1][0] >= step:
            self._bests.pop()  # An attempt continued from an earlier step.
        if self._goal.better(value, self._bests[-1][1] if self._bests else None):
            self._bests.append((step, value))

    def checkpoint(self, step: int) -> list[StepsLogged]:
        """Return an event for `recall` if metrics are ahead of a checkpoint's step."""
        # A loop may evaluate the first step in two calls, and the goal in the second.
        if self.best is None and len(self._evaluations) > 1:
            missing = f"no evaluation so far has a number for the goal, {self._goal.metric!r}"
            mend = "no checkpoint is the best; set goal=Goal(METRIC, MODE)"
            self._tell("goal", f"{missing}, but for {shown(sorted(self.last))}: {mend}")
        steps = [*self._counted.values(), *(series.step for series in self._series.values())]
        return [StepsLogged([step], [time.time()], {})] if max(steps, default=step) > step else []

    def _note_checkpoint(self, steps: Iterable[int]) -> None:
        for step in steps:
            self._at_checkpoints[step] = dict(self._earlier)
        if len(self._at_checkpoints) > _MOST:
            del self._at_checkpoints[next(iter(self._at_checkpoints))]

    def continue_from(self, step: int | None, kept: Iterable[Manifest]) -> None:
        """Count on from a checkpoint: its step, and each metric's own at that time.

        Later values are no longer the best, nor is any without a checkpoint. `kept`: all, by step.
        """
        counted = {} if step is None else self._at_checkpoints.get(step, {})
        if not self._evaluations:
            # Checkpoints may come from MLflow, and the journal does not.
            for one in () if self._bests else kept:
                self._recall_goal(one.metrics.get(self._goal.metric), one.step)
            at = -math.inf if step is None else max(step, counted.get(self._goal.metric, step))
            before = [best for best in self._bests if best[0] <= at]
            self._best_step, self.best = before[-1] if before else (0, None)
        if step is not None:
            self.is_continued = True
            self.step = self._floor = step
            self._counted = counted

    def had(self, names: Collection[str], step: int) -> bool:
        """Return whether the step is the newest of any of these metrics in earlier attempts."""
        return any(self._earlier.get(name) == step for name in names)

    def step_of(self, step: Any, names: Collection[str] = ()) -> int:
        """Return the step as an int. Without one, the next at which the metrics have no value."""
        read = to_float(step)
        # MLflow stores steps in 64 bits.
        if read.is_integer() and abs(read) < 2**63:
            self.step = step if type(step) is int else int(read)
            return self.step
        known = [self._series[name] for name in names if name in self._series]
        counted = max([self.step - 1, *(self._counted.get(name, self.step - 1) for name in names)])
        if (
            any(self.step in series for series in known)
            or self.step <= counted
            or (self._floor == self.step and any(name in self._earlier for name in names))
        ):
            # The steps may have gone back.
            self.step = 1 + max([self.step, counted, *(series.step for series in known)])
        if step is not None:
            self._tell(
                "step", f"a step must be an integer, not {shown(step)}: it counts as {self.step}"
            )
        return self.step

    def step_of_evaluation(self, step: Any, names: Iterable[str], *, saves: bool) -> int:
        """Return the step of an evaluation, which `log` may have logged at the newest step.

        `saves`: of a checkpoint. One of each kind, in any order, may be the same evaluation.
        """
        known, _ = self._evaluations.get(self.step, ({}, 0.0))
        is_new = self.step != self._judged.get(saves)
        judged = [n for n in names if n not in self._series or (n in known and not is_new)]
        self._judged[saves] = self.step_of(step, judged)
        return self._judged[saves]

    def take(self, read: Row) -> None:
        """Keep a row for `drain`. A handler of a signal may take it once more, and drain it."""
        step, moment, row = read
        new: dict[str, float] = {}
        # Ctrl-C may have ended an earlier try, behind the line that keeps the row.
        before = [number for number, when, _ in self._new[-1:] if when is moment]
        at = before[0] if before else self.step_of(step, row)
        self._new.append((at, moment, new))
        for name, value in row.items():
            new[name] = value  # Before it is known: else the handler would find it nowhere.
            if not self._is_first(name, at, value, moment):
                del new[name]
        if self.judges_rows and self._goal.metric in new:
            event = self._evaluated({self._goal.metric: new[self._goal.metric]}, at, moment)
            # A loop may log the goal's metric at each step.
            kept = [one for one in self._judgements if one.best and not event.best]
            self._judgements = [*kept, event]

    def drain(self, queue: list[Event]) -> None:
        """Move the rows to the queue, as events."""
        # Rows of the same metrics are one event, which costs half of what an event each does.
        events: dict[tuple[str, ...], tuple[list[int], list[float], dict[str, list[float]]]] = {}
        for at, moment, new in self._new:
            steps, times, columns = events.setdefault(tuple(new), ([], [], {n: [] for n in new}))
            steps.append(at)
            times.append(moment)
            for name, value in new.items():
                columns[name].append(value)
        if self._new:  # No handler has drained them meanwhile.
            queue.extend(StepsLogged(*columns) for columns in events.values() if columns[2])
            queue.extend(self._judgements)
            self._new, self._judgements = [], []

    def evaluation(
        self, metrics: Mapping[str, float], step: int
    ) -> tuple[Evaluated | None, dict[str, float], bool]:
        """Return an event of what is new, the metrics as logged, and if the goal's is the best."""
        known, when = self._evaluations.get(step) or ({}, self._time_at(step, metrics))
        # A checkpoint is as good as its step, also if it is not given the metrics again.
        measured = dict(known)
        for name, value in metrics.items():
            if self._is_first(name, step, value, when):
                measured[name] = value
                continue
            series = self._series[name]
            if name not in known and series.step == step and series.time == when:
                measured[name] = series.value
        new = {name: value for name, value in measured.items() if name not in known}
        event = self._evaluated(new, step, when) if new else None
        was_best = self._goal.metric in known and step == self._best_step
        return event, measured, was_best or (event is not None and event.best)

    def _evaluated(self, new: Mapping[str, float], step: int, moment: float) -> Evaluated:
        """Return the event of an evaluation, and note it."""
        goal = new.get(self._goal.metric)
        better = goal is not None and self._goal.better(goal, self.best)
        if better:
            self.best, self._best_step = goal, step
        known, when = self._evaluations.get(step) or ({}, moment)
        self.last = {**known, **new}
        self._evaluations[step] = self.last, when
        if len(self._evaluations) > _MOST:
            del self._evaluations[next(iter(self._evaluations))]
        return Evaluated(moment, step, new, better)

    def _time_at(self, step: int, metrics: Collection[str]) -> float:
        """Return the time of the values that the step has already, or the time now."""
        # A point that is sent twice with one time stays one point in MLflow.
        for name in sorted(metrics, key=lambda name: name != self._goal.metric):
            series = self._series.get(name)
            if series is not None and series.step == step:
                return series.time
        return time.time()

    def _is_first(self, name: str, step: int, value: float, moment: float) -> bool:
        """Return whether it is the metric's first value at this step. Note values that differ.

        MLflow would keep both, and no reader would know which of them counts.
        """
        series = self._series.get(name)
        if series is None:
            self._series[name] = _Series(step, value, moment)
        elif step > series.step:
            series.append(step, value, moment)
        elif step in series:
            self._note_loss(name, step, value)
            return False
        else:
            self._tell(f"{name} back", f"the steps of {name} go back from {series.step} to {step}")
            series.insert(step)
        if step <= self._earlier.get(name, step - 1):
            text = f"step {step} of {name} is not above those of an earlier attempt: "
            text += "MLflow keeps the first value of a step, and events.jsonl has all"
            self._tell(f"attempt {self._attempt}", text)
        return True

    def _note_loss(self, name: str, step: int, value: float) -> None:
        """Note that a second value of a step is lost, unless it is equal to the first."""
        series, (known, _) = self._series[name], self._evaluations.get(step, ({}, 0.0))
        before = series.value if step == series.step else known.get(name)
        if before is None:
            self._tell(
                f"{name} again",
                f"the steps of {name} go back from {series.step} to {step}, which has a value: "
                "MLflow keeps the first value of a step, so log steps that count on",
            )
        elif repr(value) != repr(before):
            text = f"{name} was logged twice at step {step}: the first counts"
            self._tell(f"{name} twice", text)

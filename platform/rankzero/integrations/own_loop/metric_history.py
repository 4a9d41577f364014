"""The steps and values of a run's metrics: one value per metric and step, and the goal's best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rankzero.events import Evaluated, Event, StepsLogged
from rankzero.experiment import Goal
from rankzero.integrations.own_loop.values import shown, to_float

Row = tuple[Any, float, Mapping[str, Any]]  # step, time, values by name


class _Value(NamedTuple):
    """A metric's newest value."""

    step: int
    value: float
    time: float


class MetricHistory:
    """The metrics of one attempt, and what it has to know of earlier ones. For one thread.

    `tell`: gets what is odd, with a key under which it is said once.
    """

    def __init__(self, goal: Goal, attempt: int, tell: Callable[[str, str], None]) -> None:
        self._goal, self._attempt, self._tell = goal, attempt, tell
        self.step = 0
        """The newest step so far."""
        self.best: float | None = None
        self.last: dict[str, float] = {}
        """The metrics of the last evaluation."""
        self._best_step = self._floor = 0
        self._newest: dict[str, _Value] = {}
        self._earlier: dict[str, int] = {}
        self._evaluated: tuple[int, dict[str, float], float] = 0, {}, 0.0

    def recall(self, events: Iterable[Event]) -> None:
        """Take the newest steps, and the best value under this goal, from earlier attempts."""
        for event in events:
            if isinstance(event, StepsLogged):
                highest = dict.fromkeys(event.metrics, max(event.steps, default=0))
            elif isinstance(event, Evaluated):
                highest = dict.fromkeys(event.metrics, event.step)
                value = event.metrics.get(self._goal.metric)
                if value is not None and self._goal.better(value, self.best):
                    self.best, self._best_step = value, event.step
            else:
                continue
            for name, step in highest.items():
                self._earlier[name] = max(step, self._earlier.get(name, step))
                self.step = max(step, self.step)
        self._floor = self.step

    def continue_from(self, step: int) -> None:
        """Count on from the step of a checkpoint."""
        self.step = self._floor = step

    def step_of(self, step: Any, names: Iterable[str] = ()) -> int:
        """Return the step as an int. Without one, the next at which the metrics have no value."""
        read = to_float(step)
        # MLflow stores steps in 64 bits.
        if read.is_integer() and abs(read) < 2**63:
            self.step = step if type(step) is int else int(read)
            return self.step
        if any(
            (name in self._earlier and self._floor == self.step)
            or (name in self._newest and self._newest[name].step == self.step)
            for name in names
        ):
            self.step += 1
        if step is not None:
            self._tell(
                "step", f"a step must be an integer, not {shown(step)}: it counts as {self.step}"
            )
        return self.step

    def columns(self, rows: Iterable[Row], floats: Iterable[float]) -> list[StepsLogged]:
        """Return the events of the rows. `floats`: all their values, in order."""
        values = iter(floats)
        # Rows of the same metrics are one event, which costs half of what an event each does.
        events: dict[tuple[str, ...], tuple[list[int], list[float], dict[str, list[float]]]] = {}
        for step, moment, metrics in rows:
            row = {name: next(values) for name in metrics}
            at = self.step_of(step, row)
            new = {n: v for n, v in row.items() if self._is_first(n, at, v, moment)}
            steps, times, columns = events.setdefault(tuple(new), ([], [], {n: [] for n in new}))
            steps.append(at)
            times.append(moment)
            for name, value in new.items():
                columns[name].append(value)
        return [StepsLogged(*columns) for columns in events.values() if columns[2]]

    def evaluation(
        self, metrics: Mapping[str, float], step: int
    ) -> tuple[Evaluated | None, dict[str, float], bool]:
        """Return an event of what is new, the metrics as logged, and if the goal's is the best."""
        at, known, when = self._evaluated
        known = known if at == step else {}
        # A point that is sent twice with one time stays one point in MLflow.
        times = [
            self._newest[name].time
            for name in sorted(metrics, key=lambda name: name != self._goal.metric)
            if name in self._newest and self._newest[name].step == step
        ]
        when = when if known else next(iter(times), time.time())
        measured = {}
        for name, value in metrics.items():
            self._is_first(name, step, value, when)
            if self._newest[name].time == when:
                measured[name] = self._newest[name].value
        new = {name: value for name, value in measured.items() if name not in known}
        self._evaluated = step, {**known, **new}, when
        goal = new.get(self._goal.metric)
        better = goal is not None and self._goal.better(goal, self.best)
        if better:
            self.best, self._best_step = goal, step
        if new:
            self.last = self._evaluated[1]
        event = Evaluated(when, step, new, better) if new else None
        is_best = better or (self._goal.metric in known and step == self._best_step)
        return event, measured, is_best

    def _is_first(self, name: str, step: int, value: float, moment: float) -> bool:
        """Return whether it is the metric's first value at this step. Note values that differ.

        MLflow would keep both, and no reader would know which of them counts.
        """
        before = self._newest.get(name)
        if before is not None and step == before.step:
            if repr(value) != repr(before.value):
                self._tell(
                    f"{name} twice", f"{name} was logged twice at step {step}: the first counts"
                )
            return False
        if before is not None and step < before.step:
            self._tell(f"{name} back", f"the steps of {name} go back from {before.step} to {step}")
        if step <= self._earlier.get(name, step - 1):
            self._tell(
                f"attempt {self._attempt}",
                f"step {step} of {name} has a value of an earlier attempt, as after a resume: "
                "MLflow keeps the earlier values, and events.jsonl has both",
            )
        self._newest[name] = _Value(step, value, moment)
        return True

"""A trial's journal as the search sees it: quality against time and samples, and how it ended. Pure.

Time is training time: the seconds of the steps themselves, waiting for data included, evaluations and checkpoints
not. How often one evaluates is the user's taste and must not decide which configuration is the fastest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from rankzero.events import Evaluated, Event, RunEnded, RunStarted, StepsLogged, SystemSampled
from rankzero.experiment import Goal
from rankzero.metric_names import STEP_SECONDS


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """The goal's metric after some training."""

    step: int
    seconds: float
    value: float


@dataclasses.dataclass
class LearningCurve:
    """What is known of a trial so far; takes events."""

    goal: Goal
    points: list[CurvePoint] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    """Training time up to the last report."""
    step: int = 0
    total_steps: int | None = None
    started: float | None = None
    first_step: float | None = None
    """When the first step had ended, by the clock."""
    ended: RunEnded | None = None
    peaks: dict[str, float] = dataclasses.field(default_factory=dict)
    """The highest mean of each system metric."""

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.started, self.total_steps, self.ended = event.time, event.total_steps, None
            case StepsLogged(steps=steps, times=times, metrics=metrics):
                self.first_step = self.first_step or times[0]
                if STEP_SECONDS in metrics:
                    self.seconds += metrics[STEP_SECONDS][-1] * (steps[-1] - self.step)
                    self.step = steps[-1]
            case Evaluated(step=step, metrics=metrics) if self.goal.metric in metrics:
                self.points.append(CurvePoint(step, self.seconds, metrics[self.goal.metric]))
            case SystemSampled(metrics=metrics):
                self.peaks |= {
                    name: max(value, self.peaks.get(name, value)) for name, value in metrics.items()
                }
            case RunEnded():
                self.ended = event
            case _:
                pass

    @property
    def best(self) -> float | None:
        """Return the best value of the goal's metric so far."""
        best: float | None = None
        for point in self.points:
            best = point.value if self.goal.better(point.value, best) else best
        return best

    @property
    def samples_per_second(self) -> float | None:
        return None if self.ended is None else self.ended.metrics.get("samples_per_second")

    @property
    def joules(self) -> float | None:
        """Return the energy that the job's GPUs took, where it is measured."""
        return self.peaks.get(
            "system/gpu_energy_joules", self.peaks.get("system/gpu_0_energy_joules")
        )

    def seconds_to(self, target: float) -> float | None:
        """Return the training time until the metric first reached `target`; None where it has not.

        Between the evaluation that reached it and the one before, the metric is taken for a straight line; the
        first evaluation has none before it, and counts in full.
        """
        bar = dataclasses.replace(self.goal, target=target)
        before: CurvePoint | None = None
        for point in self.points:
            if bar.reached(point.value):
                return point.seconds if before is None else _crossing(before, point, target)
            if math.isfinite(point.value) and (
                before is None or self.goal.better(point.value, before.value)
            ):
                before = point
            elif before is not None:
                before = dataclasses.replace(
                    before, seconds=point.seconds
                )  # no better since: the line starts here
        return None

    def gap(self, target: float) -> float:
        """Return by how much the best value misses `target`, relative to it: 0 or less where it is reached."""
        if self.best is None:
            return 1.0
        missing = target - self.best if self.goal.mode == "max" else self.best - target
        return missing / max(abs(target), 1e-12)


def folded(events: Iterable[Event], goal: Goal) -> LearningCurve:
    """Return the curve of a whole journal."""
    curve = LearningCurve(goal)
    for event in events:
        curve(event)
    return curve


def _crossing(before: CurvePoint, after: CurvePoint, target: float) -> float:
    share = (target - before.value) / (after.value - before.value)
    return before.seconds + share * (after.seconds - before.seconds)

"""What a search is after, behind one interface: a number to minimise, constraints, when to stop a trial. Pure.

    time-to-target   training seconds until the goal's metric reaches the target
    throughput       samples/s, of configurations whose quality is worse than the reference by no more than a tolerance
    quality          the best metric within a fixed training time

Every finished trial gets a value and the same named constraints: above 0 is violated, and by how much, relative to
what is asked. A trial without one counts as feasible (Optuna 5), so none is ever left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from rankzero.experiment import Goal
from rankzero.tuning.learning_curve import LearningCurve

Name = Literal["time-to-target", "throughput", "quality"]
NAMES: tuple[Name, ...] = ("time-to-target", "throughput", "quality")
QUALITY = "quality"
HOPELESS = 1.1  # a trial this much slower than the best cannot win: noise is smaller


@dataclasses.dataclass(frozen=True)
class Score:
    """A trial's value, to be minimised, and by how much it violates each constraint."""

    value: float
    constraints: Mapping[str, float]

    @property
    def feasible(self) -> bool:
        return all(violation <= 0 for violation in self.constraints.values())


@dataclasses.dataclass(frozen=True)
class Objective:
    """One of the three objectives, once its bar is known."""

    name: Name
    goal: Goal
    target: float | None
    """The quality to reach; for `quality`, none is needed."""
    trial_minutes: float | None = None
    """For `quality`: the training time that each trial gets."""

    def settings(self) -> dict[str, Any]:
        """Return what the objective changes in a trial's configuration."""
        if self.name == "time-to-target":
            return {"goal.target": self.target, "train.limits.stop_at_target": True}
        return {"train.limits.max_minutes": self.trial_minutes} if self.name == "quality" else {}

    def judge(self, curve: LearningCurve) -> Score:
        """Return what a finished trial is worth."""
        return Score(self._value(curve), {QUALITY: self.gap(curve)})

    def gap(self, curve: LearningCurve) -> float:
        """Return by how much the trial's quality misses what is asked, relative to it."""
        if self.target is None:
            return 0.0 if curve.best is not None else 1.0
        return curve.gap(self.target)

    def progress(self, curve: LearningCurve) -> float:
        """Return what pruning compares at equal training time, to be minimised: how far the best still has to go."""
        return self.gap(curve) if self.target is not None else -_signed(curve)

    def hopeless(self, curve: LearningCurve, best: float | None) -> bool:
        """Tell whether the trial cannot beat the value `best` any more, whatever its quality becomes."""
        return (
            self.name == "time-to-target" and best is not None and curve.seconds > HOPELESS * best
        )

    def _value(self, curve: LearningCurve) -> float:
        match self.name:
            case "time-to-target":
                assert self.target is not None
                reached = curve.seconds_to(self.target)
                # Censored: it took longer than it was watched. The farther from the target, the longer.
                return (
                    curve.seconds * (1 + max(0.0, self.gap(curve))) if reached is None else reached
                )
            case "throughput":
                return -(curve.samples_per_second or 0.0)
            case "quality":
                return -_signed(curve)


def bar(goal: Goal, name: Name, reference: LearningCurve, tolerance: float) -> float | None:
    """Return the quality that trials have to reach, once the user's own configuration has been trained.

    `tolerance`: relative, of the reference's best, for `throughput`.
    """
    if name == "quality":
        return None
    if name == "time-to-target" and goal.target is not None:
        return goal.target
    if reference.best is None:
        return goal.target
    slack = tolerance * abs(reference.best) if name == "throughput" else 0.0
    return reference.best - slack if goal.mode == "max" else reference.best + slack


def _signed(curve: LearningCurve) -> float:
    """Return the best value so that more is better."""
    if curve.best is None:
        return -math.inf
    return curve.best if curve.goal.mode == "max" else -curve.best

"""The value that a search minimises, its constraint, and when a trial cannot win. Pure.

    time-to-target   training seconds until the goal's metric reaches the target
    energy           joules until then
    throughput       samples/s, with a quality at most a tolerance worse than the reference's
    tokens           tokens/s, with the same constraint
    quality          the best metric after fixed minutes of the clock

Every finished trial gets a value and the same named constraints. A constraint above 0 is violated,
by that much relative to what is wanted. Optuna takes a trial without constraints for feasible, so
none may lack them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from rankzero.errors import UserError
from rankzero.experiment import Goal
from rankzero.scalars import shown
from rankzero.tuning.learning_curve import CurvePoint, LearningCurve

Name = Literal["time-to-target", "throughput", "tokens", "quality", "energy"]
NAMES: tuple[Name, ...] = get_args(Name)
TO_TARGET: tuple[Name, ...] = ("time-to-target", "energy")
"""The objectives that count what is spent until the target, which ends a trial."""
QUALITY = "quality"
"""The constraint that every objective has."""
MEMORY = "memory"
"""A constraint of a trial: 1.0 if the device ran out of memory."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """One of the objectives, and the quality that it asks for."""

    name: Name
    goal: Goal
    target: float | None
    """The quality to reach; `quality` needs none."""
    trial_minutes: float | None = None
    """For `quality`: the minutes of each trial by the clock, evaluations included."""

    def settings(self) -> dict[str, Any]:
        """Return the settings that the objective changes in a trial's configuration."""
        if self.name in TO_TARGET and self.target is not None:
            return {"goal.target": self.target, "train.limits.stop_at_target": True}
        # A trial that stops at the user's target shows no more than that, and may miss another.
        whole = {"train.limits.stop_at_target": False}
        minutes = {"train.limits.max_minutes": self.trial_minutes}
        return {**minutes, **whole} if self.name == "quality" else whole

    def value(self, curve: LearningCurve) -> float:
        """Return the value of a finished trial, to be minimised.

        Raises UserError for `tokens` if the experiment counts none, and for `energy` if the
        machine does not.
        """
        if self.name == "throughput":
            # A short trial ends before its speed is steady, and has none in its summary.
            return -(curve.samples_per_second or curve.mean_speed)
        if self.name == "tokens":
            speed = curve.tokens_per_second
            if speed is None:
                raise UserError(
                    "--objective tokens needs an experiment that counts them: write "
                    "tokens(self, batch), or use --objective throughput"
                )
            return -speed
        if self.name == "quality" or self.target is None:
            return self._negated_best(curve)
        each = self._watts(curve) if self.name == "energy" else 1.0
        reached = curve.seconds_to(self.target)
        if reached is not None:
            return each * reached
        # Censored: it would take longer than it was trained. The wider the gap, the longer.
        # An early stop must not make it look fast.
        return each * curve.full_seconds * (1 + max(0.0, self.gap(curve)))

    def text(self, value: float) -> str:
        """Return a value for people, with its unit."""
        match self.name:
            case "time-to-target":
                return f"{shown(value)} s"
            case "energy":
                return f"{shown(value)} J"
            case "throughput" | "tokens":
                return f"{shown(-value)} {'tokens' if self.name == 'tokens' else 'samples'}/s"
            case "quality":
                return f"{self.goal.metric} {shown(-value if self.goal.mode == 'max' else value)}"

    def gap(self, curve: LearningCurve) -> float:
        """Return by how much the trial's quality misses the wanted one, relative to that."""
        if self.target is None:
            return 0.0 if curve.best is not None else 1.0
        return curve.gap(self.target)

    def is_timed(self, curve: LearningCurve) -> bool:
        """Return whether the trial's value depends on the speed of its machine.

        The best metric does not, unless the training time ended before the last step.
        """
        has_all_steps = curve.total_steps is not None and curve.step >= curve.total_steps
        return self.name != "quality" or not has_all_steps

    def cost(self, curve: LearningCurve, *, is_whole: bool) -> float | None:
        """Return what the trial has cost, or what all its steps cost.

        None: the objective counts no cost, no step was taken, or its energy is not known.
        """
        is_energy = self.name == "energy"
        if self.name not in TO_TARGET or not curve.step or (is_energy and not curve.joules):
            return None
        seconds = curve.full_seconds if is_whole else curve.seconds
        return seconds * (self._watts(curve) if is_energy else 1.0)

    def is_uncertain(self, curve: LearningCurve) -> bool:
        """Return whether the trial reached the target, and another seed may take longer or not."""
        return self.name in TO_TARGET and self.target is not None and self.gap(curve) <= 0

    def progress(self, curve: LearningCurve) -> float:
        """Return the value that pruning compares at equal training time, to be minimised."""
        return self.gap(curve) if self.target is not None else self._negated_best(curve)

    def cannot_beat(self, curve: LearningCurve, best: float | None, slack: float) -> bool:
        """Return whether the trial has spent more than `slack` times the value `best`."""
        if self.name not in TO_TARGET or best is None:
            return False
        # Without a sample after the first steps, the energy may be the start's.
        is_known = self.name == "time-to-target" or curve.training_joules
        spent = self.cost(curve, is_whole=False) if is_known else None
        return (spent or 0.0) > slack * best

    def is_worse(self, curve: LearningCurve, points: Sequence[CurvePoint], ratio: float) -> bool:
        """Return whether another trial was closer to the target after as much training.

        `points`: the other trial's curve, or nothing. `ratio`: its steps for each of this one.
        """
        if self.name != "time-to-target":
            return False
        # By samples as well as by time: a machine that others slow down must not decide.
        step = ratio * curve.step
        before = [one for one in points if one.seconds <= curve.seconds and one.step <= step]
        other = dataclasses.replace(curve, points=before)
        # All values before may be NaN. Nothing is further off.
        return other.best is not None and self.gap(curve) > self.gap(other)

    def _watts(self, curve: LearningCurve) -> float:
        """Return the mean power since the first steps. The start's energy does not count."""
        if not curve.joules:
            raise UserError(
                "--objective energy found no counter. NVIDIA's driver counts the energy of GPUs "
                "(NVML). Linux counts that of processors, and only root may read it "
                "(/sys/class/powercap/intel-rapl:*/energy_uj). Use --objective time-to-target"
            )
        # A short trial may have no sample before its end. Then all of it counts as steps.
        spent = curve.training_joules or curve.joules
        return spent / max(curve.sampled_seconds or curve.seconds, 1e-9)

    def _negated_best(self, curve: LearningCurve) -> float:
        if curve.best is None:
            return math.inf
        return -curve.best if curve.goal.mode == "max" else curve.best


def target_quality(objective: Objective, curve: LearningCurve, tolerance: float) -> float | None:
    """Return the quality that trials must reach, from the curve of the user's own configuration.

    `tolerance`: for `throughput` and `tokens`, how much worse than the curve's best, relative to
    it.
    """
    name, goal, best = objective.name, objective.goal, curve.best
    if name == "quality":
        return None
    if best is None or (name in TO_TARGET and goal.target is not None):
        return goal.target
    slack = tolerance * abs(best) if name in ("throughput", "tokens") else 0.0
    return best - slack if goal.mode == "max" else best + slack

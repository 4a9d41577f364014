"""One trial, followed to its end, and what becomes of it.

    ask -> configuration -> launch -> follow the journal -> report / prune -> tell

What becomes of a trial, in Optuna and in MLflow:

    trained to its end                     COMPLETE   FINISHED
    pruned, or cannot win any more         PRUNED     KILLED
    out of memory, loss not finite         PRUNED     FAILED     an answer about the configuration: infeasible
    crash, hang (killed after a silence)   FAIL       FAILED
    Ctrl-C                                 FAIL       KILLED     tried again when the study goes on
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from rankzero.config import flatten
from rankzero.events import RunEnded, SystemSampled
from rankzero.experiment import Experiment
from rankzero.launch.failures import FailureKind
from rankzero.tuning.learning_curve import LearningCurve
from rankzero.tuning.objective import QUALITY, Objective
from rankzero.tuning.study import Study
from rankzero.tuning.trial import State
from rankzero.tuning.trials.launcher import Running

MEMORY = "memory"
OF_A_TRIAL = {
    "train.checkpoints.save_every": 0,
    "train.mlflow.log_model": False,
    "train.mlflow.log_pictures": False,
}  # a trial is judged, not kept
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """What became of a trial."""

    state: State
    curve: LearningCurve
    reason: str
    constraints: Mapping[str, float]
    value: float | None


@dataclasses.dataclass(frozen=True)
class StopRules:
    """What may end a trial before its end."""

    report: Callable[[int, float], bool] | None = None
    """Gets a rung, the same training time for every trial, and the progress there; true: prune. None: never."""
    best: float | None = None
    """The value that a trial must be able to beat."""
    rung_seconds: float = 0.0
    silence_seconds: float = 300.0
    """Without a sign of life for so long, it is killed."""


class Follower:
    """Follows one trial: reads its journal, prunes it where it cannot win, kills it after a silence."""

    def __init__(
        self,
        running: Running,
        objective: Objective,
        terms: StopRules,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running, self._objective, self._terms, self._clock = running, objective, terms, clock
        self._curve, self._heard, self._asked, self._rung = (
            LearningCurve(objective.goal),
            clock(),
            "",
            0,
        )
        self._killed = False

    def poll(self) -> TrialResult | None:
        """Read what is new, and ask the trial to stop where that is due; return what became of it once it ended."""
        if self._running.over:
            self.close()
            self._read()
            return classify(self._curve, self._objective, self._asked, self._running.failure)
        if self._read():
            self._judge()
        elif self._clock() - self._heard > self._terms.silence_seconds and not self._killed:
            self._killed, self._asked = (
                True,
                f"no sign of life for {self._terms.silence_seconds:.0f} s",
            )
            self._running.kill(self._asked)
        return None

    def stop(self) -> None:
        """Ask the trial to stop, as Ctrl-C does."""
        self._running.stop()

    def close(self) -> None:
        """Leave nothing of the trial behind."""
        self._running.close()

    def _read(self) -> bool:
        events = self._running.news()
        for event in events:
            self._curve(event)
        if not all(isinstance(event, SystemSampled) for event in events):
            self._heard = self._clock()
        return bool(events)

    def _judge(self) -> None:
        """Prune the trial where it cannot win, or where others were better at the same training time."""
        if self._asked:
            return
        best, objective, curve = self._terms.best, self._objective, self._curve
        if objective.hopeless(curve, best):
            self._asked = f"cannot beat the best, {best:.3g} s, any more"
        elif self._is_at_a_new_rung() and self._terms.report is not None:
            worse = self._terms.report(self._rung, objective.progress(curve))
            self._asked = "worse than others at the same training time" if worse else ""
        if self._asked:
            self._running.prune(self._asked)

    def _is_at_a_new_rung(self) -> bool:
        seconds = self._terms.rung_seconds
        now = int(self._curve.seconds / seconds) if seconds > 0 else 0
        if now <= self._rung or not self._curve.points:
            return False
        self._rung = now
        return True


def classify(
    curve: LearningCurve, objective: Objective, asked: str, failure: FailureKind | None = None
) -> TrialResult:
    """Return what became of a trial whose processes have ended."""
    ended = curve.ended or RunEnded(0.0, "FAILED", "no process of it said anything", None, {})
    reason = asked or ended.reason
    if ended.status == "FINISHED":
        judged = objective.judge(curve)
        return TrialResult(
            "COMPLETE", curve, ended.reason, {**judged.constraints, MEMORY: 0.0}, judged.value
        )
    if ended.status == "KILLED" and asked:
        return TrialResult(
            "PRUNED", curve, reason, {QUALITY: objective.gap(curve), MEMORY: 0.0}, None
        )
    if failure is FailureKind.OUT_OF_MEMORY:
        return TrialResult("PRUNED", curve, ended.reason, {QUALITY: 1.0, MEMORY: 1.0}, None)
    if failure is FailureKind.NOT_FINITE:
        return TrialResult("PRUNED", curve, ended.reason, {QUALITY: 1.0, MEMORY: 0.0}, None)
    return TrialResult("FAIL", curve, reason, {}, None)


def facts(found: TrialResult, experiment: Experiment, label: str) -> dict[str, Any]:
    """Return what the study keeps of a trial."""
    settings, curve = flatten(experiment), found.curve
    known = {
        "run": label,
        "reason": found.reason,
        "batch_size": settings["train.batch_size"],
        "precision": settings["train.precision"],
        "lr": settings["lr"],
        "train_seconds": curve.seconds,
        "best": curve.best,
        "samples_per_second": curve.samples_per_second,
        "memory_megabytes": _peak(curve, "gpu_memory_usage_megabytes"),
        "joules": curve.joules,
        "curve": [[point.step, round(point.seconds, 4), point.value] for point in curve.points],
    }
    return {name: fact for name, fact in known.items() if fact is not None}


def best_value(study: Study) -> float | None:
    """Return the lowest value of a feasible trial."""
    values = [trial.value for trial in study.trials() if trial.feasible and trial.value is not None]
    return min(values, default=None)


def _peak(curve: LearningCurve, name: str) -> float | None:
    stem, _, rest = name.partition("_")
    found = [
        value for key, value in curve.peaks.items() if f"/{stem}_" in key and key.endswith(rest)
    ]
    return max(found, default=None)

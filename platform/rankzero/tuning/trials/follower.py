"""Start trials, several at a time, and follow each one's journal to its end.

    ask -> configuration -> launch -> follow the journal -> report, prune -> result

One process does this, without threads. A trial ends in Optuna and in MLflow as:

    trained to its end                     COMPLETE   FINISHED
    pruned, or cannot win any more         PRUNED     KILLED
    out of memory, loss not finite         PRUNED     FAILED     the configuration is infeasible
    crash, hang (killed after a silence)   FAIL       FAILED
    Ctrl-C                                 FAIL       KILLED     tried again at the next start
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rankzero.config import flatten, override
from rankzero.errors import RunFailed
from rankzero.events import RunEnded, SystemSampled
from rankzero.experiment import Experiment
from rankzero.launch.failures import FailureKind
from rankzero.tuning.learning_curve import LearningCurve
from rankzero.tuning.objective import QUALITY, Objective
from rankzero.tuning.trial import State
from rankzero.tuning.trials.launcher import Launcher, TrialRun

MEMORY = "memory"
"""A constraint of a trial: 1.0 if the device ran out of memory."""
# A trial is measured and not kept.
_TRIAL_SETTINGS = {
    "train.checkpoints.save_every": 0,
    "train.mlflow.log_model": False,
    "train.mlflow.log_pictures": False,
    # The test set must not be looked at once for each trial.
    "train.test": False,
}


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """How a trial ended."""

    state: State
    curve: LearningCurve
    reason: str
    constraints: Mapping[str, float]
    value: float | None


@dataclasses.dataclass(frozen=True)
class TrialJob:
    """A configuration to train, what may stop it early, and the receiver of its result."""

    experiment: Experiment
    name: str
    objective: Objective
    ended: Callable[[TrialResult | None], None]
    """Called once, with None if the search stops before the trial has ended."""
    report: Callable[[int, float], bool] | None = None
    """Takes a rung (the same training time for every trial) and the progress there. True: prune."""
    best: float | None = None
    """The value that the trial must be able to beat."""
    rung_seconds: float = 0.0


class TrialPool:
    """Launchers that run trials side by side.

    `silence_seconds`: a trial is killed if its journal stays silent for so long.
    """

    def __init__(self, launchers: Sequence[Launcher], silence_seconds: float = 300.0) -> None:
        self._free, self._silence_seconds = list(launchers), silence_seconds
        self._busy: list[_Follower] = []

    def run(self, next_job: Callable[[], TrialJob | None]) -> None:
        """Run jobs until none runs and `next_job` returns None.

        A free launcher asks for the next job. Ctrl-C and errors stop all trials, at the end of a
        step, before they pass through.
        """
        try:
            while True:
                self._start(next_job)
                if not self._busy:
                    return
                # A copy: a trial that ends leaves the list.
                for follower in tuple(self._busy):
                    if (result := follower.poll()) is not None:
                        self._release(follower)
                        follower.job.ended(result)
        except BaseException:
            # All get the request before the first is waited for, so that they stop together.
            for follower in self._busy:
                follower.run.stop()
            for follower in tuple(self._busy):
                follower.run.close()
                self._release(follower)
                follower.job.ended(None)
            raise

    def run_all(self, jobs: Iterable[TrialJob]) -> None:
        """Run these jobs, in this order."""
        left = iter(jobs)
        self.run(lambda: next(left, None))

    def _start(self, next_job: Callable[[], TrialJob | None]) -> None:
        while self._free and (job := next_job()) is not None:
            try:
                follower = _Follower(self._free[0], job, self._silence_seconds)
            except BaseException:
                job.ended(None)
                raise
            self._busy.append(follower)
            self._free.pop(0)

    def _release(self, follower: _Follower) -> None:
        self._busy.remove(follower)
        # At the front: the next trial goes to a host that is warm.
        self._free.insert(0, follower.launcher)


def run_alone(launcher: Launcher, experiment: Experiment, name: str) -> TrialResult:
    """Train a configuration to its end, outside of a search; return how it ended."""
    results: list[TrialResult | None] = []
    objective = Objective("throughput", experiment.goal, None)
    TrialPool([launcher]).run_all([TrialJob(experiment, name, objective, results.append)])
    if (result := results[0]) is None:
        raise RunFailed(f"{name} was stopped")
    return result


class _Follower:
    """One trial: reads its journal, prunes it if it cannot win, kills it after a silence."""

    def __init__(self, launcher: Launcher, job: TrialJob, silence_seconds: float) -> None:
        self.launcher, self.job, self._silence_seconds = launcher, job, silence_seconds
        experiment = override(job.experiment, {**job.objective.settings(), **_TRIAL_SETTINGS})
        self.run: TrialRun = launcher.start(experiment, job.name)
        self._curve = LearningCurve(job.objective.goal)
        self._last_event = time.monotonic()
        self._rung = 0
        self._stop_reason = ""
        """Why this process asked the trial to stop."""
        self._is_killed = False

    def poll(self) -> TrialResult | None:
        """Read new events, stop the trial if that is due; return its result once it has ended."""
        if self.run.has_ended:
            # Closing waits for the end of the journal. Only then are all events there.
            self.run.close()
            self._read()
            return self._result()
        limit = self._silence_seconds
        if self._read():
            self._prune_if_due()
        elif time.monotonic() - self._last_event > limit and not self._is_killed:
            self._is_killed = True
            self._stop_reason = f"no sign of life for {limit:.0f} s"
            self.run.kill(self._stop_reason)
        return None

    def _read(self) -> bool:
        events = self.run.new_events()
        for event in events:
            self._curve(event)
        # The recorder samples the machine also while the ranks hang: that is no sign of life.
        if not all(isinstance(event, SystemSampled) for event in events):
            self._last_event = time.monotonic()
        return bool(events)

    def _prune_if_due(self) -> None:
        """Prune the trial if it cannot win, or if others were better at the same training time."""
        if self._stop_reason:
            return
        job, curve = self.job, self._curve
        # Rungs are training time. Steps of different batch sizes are no common measure.
        rung = int(curve.seconds / job.rung_seconds) if job.rung_seconds > 0 else 0
        if job.objective.cannot_beat(curve, job.best):
            self._stop_reason = f"cannot beat the best, {job.best:.3g} s, any more"
        elif rung > self._rung and curve.points and job.report is not None:
            self._rung = rung
            if job.report(rung, job.objective.progress(curve)):
                self._stop_reason = "worse than others at the same training time"
        if self._stop_reason:
            self.run.prune(self._stop_reason)

    def _result(self) -> TrialResult:
        """Return how the trial ended, after its processes have."""
        curve, objective = self._curve, self.job.objective
        ended = curve.ended or RunEnded(0.0, "FAILED", "its processes wrote no end", None, {})
        if ended.status == "FINISHED":
            return complete(curve, objective)
        reason = self._stop_reason or ended.reason
        if ended.status == "KILLED" and self._stop_reason:
            gaps = {QUALITY: objective.gap(curve), MEMORY: 0.0}
            return TrialResult("PRUNED", curve, reason, gaps, None)
        # Both are the configuration's fault, so the sampler shall learn of them. A crash may be
        # the machine's, so it has no constraints.
        infeasible = {FailureKind.OUT_OF_MEMORY: 1.0, FailureKind.NOT_FINITE: 0.0}
        if (kind := self.run.failure) in infeasible:
            constraints = {QUALITY: 1.0, MEMORY: infeasible[kind]}
            return TrialResult("PRUNED", curve, ended.reason, constraints, None)
        return TrialResult("FAIL", curve, reason, {}, None)


def complete(curve: LearningCurve, objective: Objective) -> TrialResult:
    """Return the result of a trial that was trained to its end."""
    reason = curve.ended.reason if curve.ended else ""
    constraints = {QUALITY: objective.gap(curve), MEMORY: 0.0}
    return TrialResult("COMPLETE", curve, reason, constraints, objective.value(curve))


def facts(result: TrialResult, experiment: Experiment, label: str) -> dict[str, Any]:
    """Return the study's attributes of a trial. Old studies have them: the names stay."""
    settings, curve = flatten(experiment), result.curve
    known = {
        "run": label,
        "reason": result.reason,
        "batch_size": settings["train.batch_size"],
        "precision": settings["train.precision"],
        "lr": settings["lr"],
        "train_seconds": curve.seconds,
        "best": curve.best,
        "samples_per_second": curve.samples_per_second,
        "memory_megabytes": curve.memory_megabytes,
        "joules": curve.joules,
        # Rounded: the study's database keeps it as JSON.
        "curve": [[point.step, round(point.seconds, 4), point.value] for point in curve.points],
    }
    return {name: fact for name, fact in known.items() if fact is not None}

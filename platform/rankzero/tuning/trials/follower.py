"""Start trials, several at a time, and follow each one's journal to its end.

    ask -> configuration -> launch -> follow the journal -> report, prune -> result

One process does this, without threads. A trial ends in Optuna and in MLflow as:

    trained to its end                     COMPLETE   FINISHED
    pruned, or cannot win any more         PRUNED     KILLED
    out of memory, loss not finite         PRUNED     FAILED     the configuration is infeasible
    crash, hang (killed after a silence)   FAIL       FAILED
    host process killed                    FAIL       FAILED     tried again, twice at most
    Ctrl-C                                 FAIL       KILLED     tried again at the next start
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from rankzero.config import flatten, override
from rankzero.errors import UserError
from rankzero.events import Event, RunEnded, SystemSampled
from rankzero.experiment import Experiment
from rankzero.launch.failures import FailureKind
from rankzero.tuning.learning_curve import LearningCurve
from rankzero.tuning.objective import MEMORY, QUALITY, Objective
from rankzero.tuning.trial import VALUES, State, Trial
from rankzero.tuning.trials.launcher import LaunchedTrial, TrainLauncher
from rankzero.tuning.trials.silence import Silence

_TICK_SECONDS = 0.05
_ASK_SECONDS = 1.0  # until a free launcher asks again, if no trial ends before
GIVE_UP_SECONDS = 60.0  # from the kill of a silent trial, or cell, to the end of its host
DIVERGED = "diverged"
"""A fact of a trial, and its state for people."""
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
    was_lost: bool = False
    """Whether its host process died: that may be the machine's fault."""
    values: tuple[float, ...] = ()
    """The values of each seed, if there are several."""
    diverged: bool = False
    """Whether its loss or a gradient was no finite number."""

    def leads(self, best: float | None) -> bool:
        """Return whether it reached the target, in less than the value `best`."""
        reached = self.state == "COMPLETE" and all(gap <= 0 for gap in self.constraints.values())
        return reached and 0 < (self.value or 0.0) < (math.inf if best is None else best)


@dataclasses.dataclass(frozen=True)
class TrialJob:
    """A configuration to train, what may stop it early, and the receiver of its result."""

    experiment: Experiment
    name: str
    objective: Objective
    ended: Callable[[TrialResult | None], None]
    """Called once, with None if the search stops before the trial has ended."""
    why_prune: Callable[[LearningCurve], str] = lambda _curve: ""
    """Returns why to prune the trial, or an empty text."""
    processes: int | None = None
    """None: as many as the launcher has."""


class _Trial(NamedTuple):
    launcher: TrainLauncher
    job: TrialJob
    run: LaunchedTrial
    looks: Iterator[TrialResult | None]


class TrialPool:
    """Launchers that run trials side by side.

    `silence_seconds`: a trial is killed if it shows no sign of life for so long. `option`: what
    sets it, for people.
    """

    def __init__(
        self,
        launchers: Sequence[TrainLauncher],
        silence_seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        option: str = "",
    ) -> None:
        self._free, self._silence_seconds, self._clock = list(launchers), silence_seconds, clock
        self._option = option
        self._busy: list[_Trial] = []

    def run(self, next_job: Callable[[], TrialJob | None]) -> None:
        """Run jobs until none runs and `next_job` returns None.

        A free launcher asks for the next job. Ctrl-C and errors stop all trials, at the end of a
        step, before they pass through.
        """
        ask_at = -math.inf
        try:
            while True:
                # Each question looks at the study, on the cores that the last trials are timed on.
                if self._clock() >= ask_at:
                    while self._free and (job := next_job()) is not None:
                        self._start(job)
                    ask_at = self._clock() + _ASK_SECONDS
                if not self._busy:
                    return
                if any(trial.run.is_starting for trial in self._busy):
                    # A cluster may have no room for them until these give up their machines.
                    for launcher in self._free:
                        launcher.host.close()
                looks = [(trial, next(trial.looks)) for trial in self._busy]
                for trial, result in looks:
                    if result is not None:
                        self._end(trial, result)
                        ask_at = -math.inf
                # One wait for all of them, however many there are.
                handles = [one for trial in self._busy for one in trial.run.handles]
                if not any(result for _, result in looks):
                    wait(handles, _TICK_SECONDS)
        except BaseException:
            self._stop_all()
            raise

    def _stop_all(self) -> None:
        # All get the request before the first is waited for, so that they stop together.
        for trial in self._busy:
            trial.run.stop()
        # All are closed, also if one of them cannot be.
        with contextlib.ExitStack() as ends:
            for trial in self._busy:
                ends.callback(self._end, trial, None)
                ends.callback(trial.run.close)

    def run_all(self, jobs: Iterable[TrialJob]) -> None:
        """Run these jobs, in this order."""
        left = iter(jobs)
        self.run(lambda: next(left, None))

    def keep_one(self) -> None:
        """Use one host from now on, and end the others. Call it while no trial runs."""
        for launcher in self._free[1:]:
            launcher.host.close()
        del self._free[1:]

    def _start(self, job: TrialJob) -> None:
        launcher = self._free[0]
        try:
            experiment = override(job.experiment, {**job.objective.settings(), **_TRIAL_SETTINGS})
            run = launcher.start(experiment, job.name, job.processes)
        except BaseException:
            job.ended(None)
            raise
        looks = _follow(run, job, self._silence_seconds, self._option, Silence(self._clock))
        self._busy.append(_Trial(launcher, job, run, looks))
        self._free.pop(0)

    def _end(self, trial: _Trial, result: TrialResult | None) -> None:
        self._busy.remove(trial)
        # At the front: the next trial goes to a host that is warm.
        self._free.insert(0, trial.launcher)
        trial.job.ended(result)


def run_alone(launcher: TrainLauncher, experiment: Experiment, name: str) -> TrialResult:
    """Train a configuration to its end, outside of a search; return how it ended."""
    results: list[TrialResult | None] = []
    objective = Objective("throughput", experiment.goal, None)
    TrialPool([launcher]).run_all([TrialJob(experiment, name, objective, results.append)])
    assert results[0] is not None  # a trial that was stopped raises
    return results[0]


def _follow(
    run: LaunchedTrial, job: TrialJob, silence_seconds: float, option: str, silence: Silence
) -> Iterator[TrialResult | None]:
    """Read a trial's journal to its end; yield None after each look at it, then the result.

    Prunes the trial if it cannot win, and kills it after a silence.
    """
    curve = LearningCurve(job.objective.goal)
    stop_reason, was_killed = "", False
    for events in _events(run):
        for event in events:
            curve(event)
        if run.has_ended:
            continue
        # The recorder samples the machine also while the ranks hang: that is no sign of life.
        is_idle = all(isinstance(event, SystemSampled) for event in events)
        is_alive = run.is_starting or not is_idle or run.has_beat
        silent = silence.look(is_alive=is_alive and not was_killed)
        if events and not stop_reason:
            if stop_reason := job.why_prune(curve):
                run.prune(stop_reason)
        elif not events and not was_killed and silent > silence_seconds:
            stop_reason, was_killed = f"no sign of life for {silence_seconds:.0f} s", True
            stop_reason += f" ({option})" if option else ""
            run.kill(stop_reason)
            silence.look(is_alive=True)  # from now on it counts the time to its end
        elif was_killed and silent > GIVE_UP_SECONDS:
            # Its machine may be frozen, or cut off.
            run.give_up()
        yield None
    result = _result(curve, job.objective, run.failure, stop_reason)
    # A result that was reached, and a stop by the search, count although the host died.
    is_lost = run.was_lost and result.state == "FAIL" and not stop_reason
    yield dataclasses.replace(result, was_lost=is_lost)


def _events(run: LaunchedTrial) -> Iterator[list[Event]]:
    """Yield the events since the last look, until the journal has its end."""
    while not run.has_ended:
        yield run.new_events()
    # Closing waits for the end of the journal. Only then are all events there.
    run.close()
    yield run.new_events()


def _result(
    curve: LearningCurve, objective: Objective, failure: FailureKind | None, stop_reason: str
) -> TrialResult:
    """Return how a trial ended. `stop_reason`: why the search stopped it, or an empty text."""
    ended = curve.ended or RunEnded(0.0, "FAILED", "its processes wrote no end", None, {})
    if curve.is_finished:
        try:
            return complete(curve, objective)
        except UserError as error:
            # Its recorder may have died. Without a value, it is not compared with others.
            return TrialResult("FAIL", curve, str(error), {}, None)
    if ended.status == "KILLED" and stop_reason:
        gaps = {QUALITY: objective.gap(curve), MEMORY: 0.0}
        return TrialResult("PRUNED", curve, stop_reason, gaps, None)
    # Both are the configuration's fault, so the sampler shall learn of them. A crash may be the
    # machine's, so it has no constraints.
    infeasible = {FailureKind.OUT_OF_MEMORY: 1.0, FailureKind.NOT_FINITE: 0.0}
    if failure in infeasible:
        constraints = {QUALITY: 1.0, MEMORY: infeasible[failure]}
        diverged = failure is FailureKind.NOT_FINITE
        return TrialResult("PRUNED", curve, ended.reason, constraints, None, diverged=diverged)
    return TrialResult("FAIL", curve, stop_reason or ended.reason, {}, None)


def complete(curve: LearningCurve, objective: Objective) -> TrialResult:
    """Return the result of a trial that was trained to its end. Raises as `Objective.value`."""
    reason = curve.ended.reason if curve.ended else ""
    constraints = {QUALITY: objective.gap(curve), MEMORY: 0.0}
    return TrialResult("COMPLETE", curve, reason, constraints, objective.value(curve))


def state_text(trial: Trial) -> str:
    """Return a trial's state for people: "missed" and "diverged" are states, too."""
    if trial.facts.get(DIVERGED):
        return DIVERGED
    return "missed" if trial.state == "COMPLETE" and not trial.feasible else trial.state


def combined(results: Sequence[TrialResult]) -> TrialResult:
    """Return the result of a trial that was trained on these seeds, the first one first.

    Its value is the geometric mean. A seed that did not reach the quality decides alone.
    """
    if len(results) == 1 or not results[-1].leads(None):
        return results[-1]
    values = tuple(one.value for one in results if one.value is not None)
    slowest = max(results, key=lambda one: one.value or 0.0)
    return dataclasses.replace(slowest, value=statistics.geometric_mean(values), values=values)


def facts(result: TrialResult, experiment: Experiment, label: str, devices: int) -> dict[str, Any]:
    """Return the study's attributes of a trial. Old studies have them: the names stay."""
    settings, curve = flatten(experiment), result.curve
    points = curve.points[:: -(len(curve.points) // 1000 + 1)]
    known = {
        "run": label,
        "reason": result.reason,
        DIVERGED: result.diverged or None,
        "batch_size": settings["train.batch_size"],
        "precision": settings["train.precision"],
        "lr": settings["lr"],
        "devices": devices,
        "train_seconds": curve.seconds,
        "whole_seconds": curve.full_seconds,
        VALUES: list(result.values) or None,
        "best": curve.best,
        "samples_per_second": curve.samples_per_second,
        "memory_megabytes": curve.memory_megabytes,
        "joules": curve.joules,
        # Rounded, a thousand at most, with the last: the study's database keeps it as JSON.
        "curve": [[one.step, round(one.seconds, 4), one.value] for one in points[::-1]],
    }
    return {name: fact for name, fact in known.items() if fact is not None}

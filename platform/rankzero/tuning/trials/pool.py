"""Several trials side by side, each on a share of the machine of its own; one process, no threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from rankzero.experiment import Experiment
from rankzero.tuning.objective import Objective
from rankzero.tuning.trials.follower import Follower, StopRules, TrialResult
from rankzero.tuning.trials.launcher import Launcher


def nothing() -> None:
    """Do nothing."""


@dataclasses.dataclass(frozen=True)
class TrialJob:
    """A configuration to train, and what to do with what becomes of it."""

    experiment: Experiment
    name: str
    objective: Objective
    terms: StopRules
    done: Callable[[TrialResult], None]
    interrupted: Callable[[], None] = nothing
    """Called instead of `done` where the search ends before the job does."""


@dataclasses.dataclass(frozen=True)
class _RunningJob:
    launcher: Launcher
    job: TrialJob
    follower: Follower


def in_turn(jobs: Iterable[TrialJob]) -> Callable[[], TrialJob | None]:
    """Return what gives one job after the other, then None."""
    left = iter(jobs)
    return lambda: next(left, None)


class TrialPool:
    """Launchers that work side by side."""

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        self._free = list(launchers)
        self._busy: list[_RunningJob] = []

    def work(self, next_job: Callable[[], TrialJob | None]) -> None:
        """Work until all jobs are done. `next_job` is asked whenever a launcher is free; None: nothing to start now.

        Ctrl-C and errors stop all trials, at the end of a step, before they pass through.
        """
        try:
            while True:
                self._start(next_job)
                if not self._busy:
                    return
                for post in tuple(self._busy):
                    self._look_at(post)
        except BaseException:
            self._stop()
            raise

    def _start(self, next_job: Callable[[], TrialJob | None]) -> None:
        while self._free and (job := next_job()) is not None:
            try:
                running = self._free[0].start(job.experiment, job.name)
            except BaseException:
                job.interrupted()
                raise
            self._busy.append(
                _RunningJob(self._free.pop(0), job, Follower(running, job.objective, job.terms))
            )

    def _look_at(self, post: _RunningJob) -> None:
        found = post.follower.poll()
        if found is not None:
            self._leave(post)
            post.job.done(found)

    def _stop(self) -> None:
        for post in self._busy:
            post.follower.stop()
        for post in tuple(self._busy):
            post.follower.close()
            self._leave(post)
            post.job.interrupted()

    def _leave(self, post: _RunningJob) -> None:
        self._busy.remove(post)
        self._free.insert(0, post.launcher)

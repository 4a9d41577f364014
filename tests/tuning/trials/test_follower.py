"""Following trials, without processes."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from rankzero import Experiment, Goal
from rankzero.tuning.objective import Objective
from rankzero.tuning.trials.follower import TrialJob, TrialPool, TrialResult
from support.fake_launcher import FakeLauncher

GOAL = Goal("val/accuracy", "max")


def run_one(launcher: FakeLauncher, pool: TrialPool) -> tuple[TrialResult, list[str]]:
    """Run one trial; return its result, and what it was asked."""
    results = list[TrialResult | None]()
    objective = Objective("time-to-target", GOAL, 0.9)
    pool.run_all([TrialJob(Experiment(), "t", objective, results.append)])
    assert results[0] is not None
    return results[0], launcher.running[0].asked


@pytest.mark.parametrize(
    ("fate", "seconds", "state"),
    [("late", 400.0, "COMPLETE"), ("evaluates", 0.9, "COMPLETE"), ("hang", 0.9, "FAIL")],
    ids=["the search stood still", "it evaluates", "it hangs"],
)
def test_a_trial_is_killed_after_a_silence_of_its_own(
    fate: str, seconds: float, state: str
) -> None:
    launcher = FakeLauncher(lambda *_: fate)
    moments = itertools.count()
    pool = TrialPool([cast("Any", launcher)], 5.0, lambda: seconds * next(moments), "--limit")
    result, asked = run_one(launcher, pool)
    killed = ["no sign of life for 5 s (--limit)"] if state == "FAIL" else []
    assert (result.state, asked) == (state, killed)

"""Following trials, without processes."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from rankzero import Experiment, Goal
from rankzero.tuning.learning_curve import CurvePoint, LearningCurve
from rankzero.tuning.objective import Objective
from rankzero.tuning.trials.follower import TrialJob, TrialPool, TrialResult, facts
from support.fake_launcher import FakeLauncher

GOAL = Goal("val/accuracy", "max")


def run_one(launcher: FakeLauncher, pool: TrialPool) -> tuple[TrialResult, list[str]]:
    """Run one trial; return its result, and what it was asked."""
    results = list[TrialResult | None]()
    objective = Objective("time-to-target", GOAL, 0.9)
    pool.run_all([TrialJob(Experiment(), "t", objective, results.append)])
    assert results[0] is not None
    return results[0], launcher.running[0].asked


@pytest.mark.parametrize(("tick", "most"), [(0.0, 3), (0.1, 30)])
def test_a_free_launcher_asks_for_work_once_a_second_and_after_each_end(
    tick: float, most: int
) -> None:
    launcher, moments = cast("Any", FakeLauncher(lambda *_: "evaluates")), itertools.count()
    objective, asked = Objective("time-to-target", GOAL, 0.9), list[int]()
    job = TrialJob(Experiment(), "t", objective, lambda _: None)

    def next_job() -> TrialJob | None:
        asked.append(len(launcher.started))
        return None if launcher.started else job

    TrialPool([launcher] * 2, 5.0, lambda: tick * next(moments)).run(next_job)
    assert asked[:2] == [0, 1] and 3 <= len(asked) <= most
    assert (len(asked) > 3) == (tick > 0)


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


def test_the_study_keeps_a_thousand_points_of_a_long_curve() -> None:
    points = [CurvePoint(step, step / 7, 0.9123456789012345) for step in range(5000)]
    curve = LearningCurve(Goal("val/accuracy", "max"), points)
    kept = facts(TrialResult("COMPLETE", curve, "", {}, 1.0), Experiment(), "s-t00", 1)["curve"]
    # MySQL's column has 65,535 bytes.
    assert len(str(kept)) < 60_000 and kept[-1][0] == 4999 and kept == sorted(kept)

"""Values of a search as people read them. Their computation: test_learning_curve.py."""

from __future__ import annotations

import pytest

from rankzero.config import override
from rankzero.errors import UserError
from rankzero.events import RunEnded, StepsLogged
from rankzero.experiment import Experiment, Goal, Train
from rankzero.tuning.learning_curve import LearningCurve
from rankzero.tuning.objective import Name, Objective

ACCURACY, LOSS = Goal("val/accuracy", "max", target=0.9), Goal("val/loss", "min")


@pytest.mark.parametrize(
    ("name", "goal", "value", "text"),
    [
        ("time-to-target", ACCURACY, 0.579231, "0.5792 s"),
        ("time-to-target", ACCURACY, 12_345.6, "12,346 s"),
        ("energy", ACCURACY, 476.62, "476.6 J"),
        ("throughput", ACCURACY, -30_345.4, "30,345 samples/s"),
        ("tokens", LOSS, -397_131.0, "397,131 tokens/s"),
        ("quality", ACCURACY, -0.98334, "val/accuracy 0.9833"),
        ("quality", LOSS, 0.25, "val/loss 0.25"),
    ],
)
def test_a_value_has_its_unit_and_its_sign(name: Name, goal: Goal, value: float, text: str) -> None:
    assert Objective(name, goal, goal.target).text(value) == text


def test_a_trial_that_is_too_short_for_a_steady_speed_has_its_mean_tokens() -> None:
    curve, tokens = LearningCurve(LOSS), Objective("tokens", LOSS, None)
    for step, seconds, rate in ((1, 3.0, 100.0), (11, 0.1, 500.0)):
        metrics = {"throughput/step_seconds": [seconds], "throughput/tokens_per_second": [rate]}
        curve(StepsLogged([step], [0.0], metrics))
    curve(RunEnded(9.0, "FINISHED", "done", None, {}))
    assert tokens.value(curve) == pytest.approx(-(300.0 + 500.0) / 4.0)
    curve(RunEnded(9.0, "FINISHED", "done", None, {"tokens_per_second": 512.0}))
    assert tokens.value(curve) == -512.0


def test_an_experiment_that_counts_no_tokens_is_refused() -> None:
    curve = LearningCurve(LOSS)
    curve(StepsLogged([1], [0.0], {"throughput/step_seconds": [1.0]}))
    curve(RunEnded(9.0, "FINISHED", "done", None, {}))
    with pytest.raises(UserError, match=r"write tokens\(self, batch\)"):
        Objective("tokens", LOSS, None).value(curve)


def test_only_an_objective_that_counts_until_the_target_stops_there() -> None:
    class Stops(Experiment):
        train: Train = Train(limits=Train.Limits(stop_at_target=True))
        goal: Goal = Goal("val/accuracy", "max", target=0.9)

    changed = override(Stops(), Objective("quality", Stops().goal, None, 2.0).settings()).train
    assert (changed.limits.max_minutes, changed.limits.stop_at_target) == (2.0, False)
    speeds: tuple[Name, ...] = ("throughput", "tokens")
    for name in speeds:
        # The reference may be better than its target, and so must be the trials.
        changed = override(Stops(), Objective(name, Stops().goal, 0.95).settings()).train
        assert (changed.limits.max_minutes, changed.limits.stop_at_target) == (None, False)

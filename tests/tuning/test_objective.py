"""Values of a search as people read them. Their computation: test_learning_curve.py."""

from __future__ import annotations

import pytest

from rankzero.config import override
from rankzero.experiment import Experiment, Goal, Train
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

"""Confirmation: rounds in which the machine's speed changed."""

from __future__ import annotations

import math
import random

import pytest

from rankzero.tuning.space import FACTOR
from rankzero.tuning.trial import Trial, Trials
from rankzero.tuning.verdict import confirm
from rankzero.tuning.verdict.confirm import by_trial, candidates_of, disturbed
from rankzero.tuning.verdict.decide import ConfirmationRun
from support.company import SPACE


def rounds(
    speeds: list[list[float]], noise: float = 0.0, draw: random.Random | None = None
) -> list[dict[str, float]]:
    """Return the stored runs of these samples/s: one list for each seed."""
    draw = draw or random.Random(0)
    return [
        {
            "seed": 1000 + number,
            "trial": trial,
            "samples_per_second": speed * math.exp(draw.gauss(0, noise)),
        }
        for number, found in enumerate(speeds)
        for trial, speed in enumerate(found)
    ]


def test_a_step_within_a_round_disturbs_that_round() -> None:
    steady, after = [100.0, 300.0, 200.0], [80.0, 240.0, 160.0]
    assert disturbed(rounds([steady, steady, steady])) == []
    assert disturbed(rounds([steady, [100.0, 240.0, 160.0], after], 0.005)) == [1001]


def test_a_change_of_speed_spoils_no_round_whose_values_do_not_depend_on_time() -> None:
    stored = rounds([[100.0, 300.0], [100.0, 200.0], [100.0, 300.0]])
    assert disturbed(stored) == [1001]
    assert disturbed([{**run, "is_timed": False} for run in stored]) == []
    assert disturbed([{**run, "is_timed": run["trial"] == 1} for run in stored]) == [1001]


def test_a_slower_machine_that_stays_so_disturbs_no_round() -> None:
    slower = [[100.0 * share, 300.0 * share] for share in (1.0, 0.8, 0.8)]
    drifting = [[100.0 * share, 300.0 * share] for share in (1.0, 0.93, 0.86)]
    assert disturbed(rounds(slower, 0.005)) == disturbed(rounds(drifting, 0.005)) == []


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
def test_noise_rarely_counts_as_a_disturbance(noise: float) -> None:
    draw = random.Random(7)
    tables = [rounds([[100.0, 300.0, 200.0]] * 3, noise, draw) for _ in range(300)]
    assert sum(bool(disturbed(table)) for table in tables) <= 0.15 * len(tables)


def test_too_few_runs_show_nothing() -> None:
    assert disturbed([]) == []
    assert disturbed(rounds([[100.0, 300.0], [100.0, 100.0]])) == []
    assert disturbed(rounds([[100.0], [50.0], [100.0]])) == []
    unknown = [{**run, "samples_per_second": None} for run in rounds([[1.0, 2.0]] * 3)]
    assert disturbed(unknown) == []


@pytest.mark.parametrize(
    ("first", "mean", "seeds", "best", "factor"),
    [
        (1.0, 1.0, 1, None, 4.0),  # the first trial that reached the target
        (1.0, 1.0, 1, 1.1, 2.0),  # never below
        (1.0, 1.0, 1, 9.0, 81.0),  # the mean of 1 and 81 is 9
        (1.0, 2.0, 2, 4.0, 16.0),  # and that of 2, 2 and 16 is 4
    ],
)
def test_a_trial_is_trained_on_while_its_mean_may_lead(
    first: float, mean: float, seeds: int, best: float | None, factor: float
) -> None:
    assert confirm.factor_to_lead(first, mean, seeds, best) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("objective", "value", "text"),
    [("quality", 200.0, "-200"), ("quality", None, "missed"), ("throughput", -90.0, "90")],
)
def test_a_confirmed_metric_keeps_its_sign(objective: str, value: float | None, text: str) -> None:
    run = {"trial": 1, "seed": 1000, "value": value, "quality": -200.0}
    facts = {"confirmations": [run], "space": {"settings": {"--objective": objective}}}
    assert confirm.rows(facts) == [["1", text]]


def test_confirmations_of_a_newer_version_are_read() -> None:
    fields = {"trial": 3, "seed": 1000, "value": 2.0, "quality": 0.97, "samples_per_second": 90.0}
    newer = by_trial([{**fields, "memory_bytes": None, "unheard_of": 1}])
    assert newer == {3: [ConfirmationRun(3, 1000, 2.0, 0.97, 90.0, None)]}


def test_a_challenger_of_an_interrupted_confirmation_is_no_candidate() -> None:
    own = SPACE.reference_parameters()
    ended = [
        Trial(number, "COMPLETE", {**own, FACTOR: 1.0 + number}, 9.0, {"quality": 0.0}, {})
        for number in range(3)
    ]
    stored = [
        {"trial": number, "seed": seed, "value": 9.0, "quality": 0.9, "samples_per_second": 1.0}
        for number, seeds in ((0, 3), (1, 3), (2, 1))
        for seed in range(seeds)
    ]
    reference, challengers = candidates_of(Trials(ended), SPACE, stored, 3)
    assert [one.trial for one in (reference, *challengers)] == [0, 1]

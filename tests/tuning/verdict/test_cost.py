"""Time against cost: the front, the recommendations, and how they read."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rankzero.experiment import Experiment
from rankzero.tuning.next_trial import front
from rankzero.tuning.space import DEVICES, make_space
from rankzero.tuning.trial import Trial
from rankzero.tuning.verdict.cost import (
    DeviceResult,
    PricedTrial,
    device_result,
    priced,
    recommended,
    time_and_cost,
)

SPACE = make_space(Experiment(), 1, 0.5, more=(2, 4))
POINTS = st.lists(
    st.tuples(st.integers(1, 8), st.floats(0.1, 1000.0), st.integers(0, 3)), min_size=1, max_size=12
)


def trial(number: int, devices: int, seconds: float | None, gap: float = 0.0) -> Trial:
    state = "PRUNED" if seconds is None else "COMPLETE"
    return Trial(number, state, {DEVICES: devices}, seconds, {"quality": gap}, {})


def confirmed(number: int, *seconds: float | None) -> list[dict[str, object]]:
    return [
        {"trial": number, "seed": 1000 + place, "value": value, "quality": 0.9}
        for place, value in enumerate(seconds)
    ]


def points(drawn: list[tuple[int, float, int]], price: float = 1.0) -> list[PricedTrial]:
    return [
        PricedTrial(number, devices, seconds, seconds * devices * price, seeds)
        for number, (devices, seconds, seeds) in enumerate(drawn)
    ]


@given(POINTS)
def test_nothing_beats_the_front_and_the_front_beats_all_others(
    drawn: list[tuple[int, float, int]],
) -> None:
    found = points(drawn)
    kept = front(found, time_and_cost)

    def beats(one: PricedTrial, other: PricedTrial) -> bool:
        return one.seconds <= other.seconds and one.cost <= other.cost

    assert [one.cost for one in kept] == sorted((one.cost for one in kept), reverse=True)
    for one in found:
        rivals = [other for other in kept if beats(other, one)]
        assert rivals if one not in kept else rivals == [one]


@example([(2, 1.0, 3), (1, 1.0, 3)], 1.0, 1.0)
@given(POINTS, st.floats(0.01, 100.0), st.floats(0.01, 100.0))
def test_the_knee_is_on_the_front_whatever_the_currency_and_the_clock(
    drawn: list[tuple[int, float, int]], price: float, clock: float
) -> None:
    drawn = [(devices, seconds, 3) for devices, seconds, _ in drawn]
    own = recommended(points(drawn), -1)
    assert set(own) == {"fastest", "knee", "cheapest"}
    costs = {one.cost for one in front(points(drawn), time_and_cost)}
    assert {one.cost for one in own.values()} <= costs
    assert own["fastest"].seconds <= own["knee"].seconds <= own["cheapest"].seconds
    other = recommended(points([(n, clock * t, 3) for n, t, _ in drawn], price), -1)["knee"]
    product = own["knee"].seconds * own["knee"].cost * clock**2 * price
    assert other.seconds * other.cost == pytest.approx(product)


def test_confirmed_configurations_have_intervals_and_are_recommended() -> None:
    trials = [trial(0, 1, 100.0), trial(1, 4, 30.0), trial(2, 2, 45.0), trial(3, 4, 20.0)]
    trials += [trial(4, 1, None), trial(5, 1, 10.0, gap=0.1), trial(6, 4, 25.0)]
    stored = [*confirmed(0, 100.0, 105.0, 95.0), *confirmed(1, 30.0, 31.0, 29.0)]
    stored += [*confirmed(2, 45.0, 46.0, 44.0), *confirmed(6, 25.0, None, 25.0)]
    found = {one.trial: one for one in priced(trials, SPACE, stored, 36.0)}
    assert set(found) == {0, 1, 2, 3}, "what missed the target is left out, also on one seed"
    assert found[0].seconds == pytest.approx(99.9, abs=0.1) and found[0].seeds == 3
    assert found[0].cost == pytest.approx(found[0].seconds * 1 * 36.0 / 3600)
    assert found[1].cost == pytest.approx(found[1].seconds * 4 * 36.0 / 3600)
    assert 1.01 < found[0].spread == found[1].spread < 1.2, "one pooled deviation"
    assert found[3].seeds == 0 and math.isnan(found[3].spread)
    best = recommended(list(found.values()), 1)
    assert {name: one.trial for name, one in best.items()} == {
        "fastest": 1,
        "knee": 1,
        "cheapest": 2,
    }, "trial 3 was faster, and lucky as far as anyone knows"


def test_the_result_reads_as_sentences_and_tables() -> None:
    stored = [*confirmed(0, 100.0, 102.0), *confirmed(1, 40.0, 41.0)]
    result = device_result([trial(0, 1, 99.0), trial(1, 4, 39.0)], SPACE, stored, 3.6, 1, [])
    text, ratio = result.sentences()
    assert text == (
        "To the target, at 3.6 per device-hour: fastest and knee 40.5 s and 0.162 on 4 devices "
        "(trial 1); cheapest 101 s and 0.101 on 1 device (trial 0)."
    )
    more = "4 devices: 1.6x (1.5 to 1.7) the cost for 2.5x (2.3 to 2.7) the speed of 1 device."
    assert ratio == more
    ((name, columns, rows),) = result.tables()
    assert name == "cost.json" and len(rows) == 2 and {len(row) for row in rows} == {len(columns)}
    assert rows[0][:2] == ["1", "4"] and rows[0][-1] == "fastest, knee" and " to " in rows[0][2]


def test_without_a_price_or_a_trial_at_the_target_there_is_no_cost() -> None:
    nothing = device_result([trial(0, 1, 100.0)], SPACE, [], None, 0, [])
    assert nothing == DeviceResult(None, [], {}, None)
    missed = device_result([trial(0, 1, 100.0, gap=0.2)], SPACE, [], 3.6, 0, [])
    assert missed.sentences() == [] and missed.tables() == []
    alone = device_result([trial(0, 1, 100.0)], SPACE, [], 3.6, 0, [])
    assert alone.sentences() == [
        "To the target, at 3.6 per device-hour: fastest, knee and cheapest 100 s and 0.1 on 1 "
        "device (trial 0)."
    ]


@given(POINTS, st.integers(0, 11))
def test_the_fastest_is_never_slower_than_the_cheapest(
    drawn: list[tuple[int, float, int]], winner: int
) -> None:
    # A verdict may prefer a configuration that is slower within the noise.
    best = recommended(points([(n, t, 3) for n, t, _ in drawn]), winner)
    assert best["fastest"].seconds <= best["knee"].seconds <= best["cheapest"].seconds
    assert best["fastest"].cost >= best["knee"].cost >= best["cheapest"].cost


def test_the_winner_is_recommended_among_those_that_nothing_separates() -> None:
    same = [PricedTrial(0, 1, 100.0, 100.0, 3), PricedTrial(1, 1, 98.0, 98.0, 3)]
    assert {one.trial for one in recommended(same, 0).values()} == {0}
    fewer = [PricedTrial(0, 4, 100.0, 400.0, 3), PricedTrial(1, 1, 99.0, 99.0, 3)]
    assert {one.trial for one in recommended(fewer, 0).values()} == {1}


def test_hours_are_no_powers_of_ten() -> None:
    text, _ = device_result(
        [trial(0, 1, 86400.0), trial(1, 4, 30000.0)], SPACE, [], 250.0, 1, []
    ).sentences()
    assert "30,000 s and 8,333 on 4 devices" in text and "86,400 s and 6,000" in text

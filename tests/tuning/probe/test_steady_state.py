"""When a speed may be believed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.confidence import half_width
from rankzero.tuning.probe.steady_state import FEWEST, SteadyState


def measured(draw: random.Random, r: float, spread: float = 0.05) -> SteadyState:
    """Watch an AR(1) process of mean 1 until it is enough."""
    steady, state = SteadyState(most_seconds=60.0), draw.gauss(0, spread)
    while not steady.enough:
        state = r * state + math.sqrt(1 - r * r) * draw.gauss(0, spread)
        steady.add(1 + state)
    return steady


@pytest.mark.parametrize("r", [0.0, 0.3, 0.5])
def test_the_interval_covers_the_true_mean_of_correlated_windows(r: float) -> None:
    draw = random.Random(3)
    hits = 0
    for _ in range(600):
        steady = measured(draw, r)
        hits += abs(steady.mean - 1) <= steady.relative_half_width * steady.mean
    assert hits / 600 >= 0.9


def test_warm_up_windows_do_not_count() -> None:
    steady = SteadyState(most_seconds=6.0)
    for seconds in (9.0, 3.0, 1.5, 1.0, 1.0, *[1.0] * FEWEST):
        steady.add(seconds)
    assert (
        steady.warm and steady.enough and steady.mean == 1.0 and steady.relative_half_width == 0.0
    )


def test_a_speed_that_never_settles_ends_by_the_time_limit() -> None:
    steady, count = SteadyState(most_seconds=5.0), 0
    while not steady.enough and count < 1000:
        steady.add(2.0 if count % 2 else 1.0)
        count += 1
    assert steady.enough and count < 40


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=50))
def test_correlation_never_narrows_the_interval(values: list[float]) -> None:
    steady = SteadyState(most_seconds=60.0, windows=values)
    plain = (half_width(values) or 0.0) / steady.mean
    assert plain <= steady.relative_half_width * 1.000001
    assert steady.relative_half_width <= plain * math.sqrt(19.001)


def test_a_step_of_a_minute_is_measured_twice() -> None:
    steady = SteadyState(most_seconds=4.0)
    for seconds in (90.0, 60.0, 61.0, 60.0):
        assert not steady.enough
        steady.add(seconds)
    assert steady.enough and steady.windows == [61.0, 60.0]

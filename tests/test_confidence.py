"""Student's t, and confidence intervals."""

from __future__ import annotations

import random
import statistics

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from rankzero.confidence import RunningRatio, half_width, pooled_deviation, student_t


@given(st.integers(1, 500), st.floats(0.55, 0.9999))
def test_students_quantile(freedom: int, probability: float) -> None:
    assert student_t(freedom, probability) == pytest.approx(
        scipy.stats.t.ppf(probability, freedom), rel=1e-6
    )


def test_interval_covers_the_mean_as_often_as_promised() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(2000):
        values = [draw.gauss(10.0, 2.0) for _ in range(5)]
        hits += abs(statistics.fmean(values) - 10.0) <= (half_width(values) or 0.0)
    assert 0.94 <= hits / 2000 <= 0.96


def test_one_value_has_no_interval() -> None:
    assert half_width([1.0]) is None and half_width([]) is None


def test_pooled_deviation_ignores_differences_between_groups() -> None:
    assert pooled_deviation([[1.0, 3.0], [101.0, 103.0], [7.0]]) == (pytest.approx(2**0.5), 2)
    assert pooled_deviation([[1.0], []]) == (0.0, 0)


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1e-3, 1e3)), min_size=2, max_size=40))
def test_the_interval_of_a_ratio_is_that_of_its_residuals(pairs: list[tuple[float, float]]) -> None:
    running = RunningRatio()
    for above, below in pairs:
        assert (running.half_width is None) == (running.count < 2)
        running.add(above, below)
    seconds = statistics.fmean(below for _, below in pairs)
    ratio = statistics.fmean(above for above, _ in pairs) / seconds
    wanted = half_width([(above - ratio * below) / seconds for above, below in pairs])
    assert running.above / running.below == pytest.approx(ratio)
    assert running.half_width == pytest.approx(wanted, rel=1e-6, abs=1e-5 * ratio)

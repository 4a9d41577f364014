"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero import Experiment, Train
from rankzero.lr_schedules import factor

schedules = st.sampled_from(["constant", "linear", "cosine", "one_cycle"])


@given(schedules, st.integers(1, 2000), st.data())
def test_factor_stays_between_zero_and_one(schedule: str, total: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, total))
    step = data.draw(st.integers(0, total - 1))
    assert 0 < factor(schedule, step, total, warmup) <= 1


@given(schedules, st.integers(2, 200))
def test_warm_up_rises(schedule: str, warmup: int) -> None:
    rises = [factor(schedule, step, 1000, warmup) for step in range(warmup)]
    assert rises == sorted(set(rises)) and rises[-1] < 1


def test_schedules_end_low_and_one_cycle_peaks_early() -> None:
    for schedule in ("linear", "cosine", "one_cycle"):
        assert factor(schedule, 999, 1000) < 0.01
    one_cycle = [factor("one_cycle", step, 1000) for step in range(1000)]
    assert one_cycle.index(max(one_cycle)) == 300 and one_cycle[0] == pytest.approx(0.04)


@given(schedules, st.integers(2, 300))
def test_only_one_cycle_rises_without_a_warm_up(schedule: str, total: int) -> None:
    factors = [factor(schedule, step, total) for step in range(total)]
    falls = [before >= after for before, after in pairwise(factors)]
    peak = factors.index(max(factors))
    assert all(falls[peak:]) and not any(falls[:peak]) and (peak == 0 or schedule == "one_cycle")


@given(schedules, st.integers(1, 200))
def test_the_rate_never_rises_after_a_warm_up(schedule: str, warmup: int) -> None:
    factors = [factor(schedule, step, 300, warmup) for step in range(warmup, 300)]
    assert factors[0] == 1 and factors == sorted(factors, reverse=True)


@given(schedules, st.integers(0, 10**9), st.integers(0, 100))
def test_steps_past_the_end_are_harmless(schedule: str, beyond: int, warmup: int) -> None:
    assert 0 <= factor(schedule, 100 + beyond, 100, warmup) <= 1


def test_warm_up_ends_at_the_full_rate() -> None:
    assert [factor("constant", step, 10, 3) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_experiment_uses_its_schedule_setting() -> None:
    experiment = Experiment(train=Train(schedule="linear", warmup_steps=1))
    assert [experiment.schedule(step, 5) for step in range(5)] == [0.5, 1.0, 0.75, 0.5, 0.25]

"""The learning curve and the time to target, from a journal's events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.events import Evaluated, Event, RunEnded, RunStarted, StepsLogged, SystemSampled
from rankzero.experiment import Goal
from rankzero.metric_names import SPEED
from rankzero.tuning.learning_curve import LearningCurve
from rankzero.tuning.objective import Objective

ACCURACY = Goal("val/accuracy", "max")


def folded(events: list[Event], goal: Goal) -> LearningCurve:
    curve = LearningCurve(goal)
    for event in events:
        curve(event)
    return curve


def epochs(*values: float, seconds: float = 2.0, steps: int = 10) -> list[Event]:
    """Return a journal with an evaluation after every `steps` steps, which took `seconds`.

    A step has three samples.
    """
    events: list[Event] = []
    for number, value in enumerate(values, start=1):
        step, each = number * steps, seconds / steps
        speeds = {"throughput/step_seconds": [each], SPEED: [3 / each]}
        events.append(StepsLogged([step], [100.0 + number * 50], speeds))
        events.append(Evaluated(100.0 + number * 50, step, {"val/accuracy": value}, best=False))
    return events


def test_time_is_training_time_and_not_the_clocks() -> None:
    curve = folded(epochs(0.5, 0.7, 0.9), ACCURACY)
    assert [point.seconds for point in curve.points] == pytest.approx([2.0, 4.0, 6.0])
    assert curve.best == 0.9


def test_an_early_stop_does_not_make_a_trial_look_fast() -> None:
    begun: list[Event] = [RunStarted(0.0, {}, {}, 1, 0, total_steps=100)]
    short = folded(begun + epochs(0.5, 0.5), ACCURACY)
    whole = folded(begun + epochs(*[0.5] * 10), ACCURACY)
    objective = Objective("time-to-target", ACCURACY, 0.9)
    assert short.seconds < whole.seconds
    assert objective.value(short) == pytest.approx(objective.value(whole))


def test_energy_is_that_of_the_gpus_and_without_any_that_of_the_processors() -> None:
    def joules(**readings: float) -> float | None:
        metrics = {f"system/{name}": value for name, value in readings.items()}
        return folded([SystemSampled(0.0, 0, metrics)], ACCURACY).joules

    assert joules() is None and joules(cpu_energy_joules=9.0) == 9.0
    assert joules(cpu_energy_joules=9.0, gpu_0_utilization_percentage=1.0) is None
    assert joules(cpu_energy_joules=9.0, gpu_0_energy_joules=4.0) == 4.0
    assert joules(gpu_0_energy_joules=4.0, gpu_energy_joules=7.0) == 7.0
    assert joules(gpu_0_energy_joules=4.0, gpu_1_temperature_celsius=40.0) is None
    # The second GPU was lost before its first reading.
    assert joules(gpu_0_energy_joules=4.0, gpu_utilization_percentage=90.0) is None


def test_energy_to_the_target_is_its_share_of_the_whole() -> None:
    events = [*epochs(0.5, 0.7, 0.9), SystemSampled(0.0, 0, {"system/gpu_0_energy_joules": 60.0})]
    assert Objective("energy", ACCURACY, 0.8).value(folded(events, ACCURACY)) == pytest.approx(50.0)
    start, *rest = ({"system/gpu_0_energy_joules": joules} for joules in (3000.0, 3060.0))
    events = [SystemSampled(0.0, 0, start), *events[:-1], SystemSampled(0.0, 1, rest[0])]
    assert Objective("energy", ACCURACY, 0.8).value(folded(events, ACCURACY)) == pytest.approx(50.0)


@pytest.mark.parametrize("evaluation", [0.0, 30.0])
def test_energy_to_the_target_is_without_that_of_evaluations(evaluation: float) -> None:
    """A machine takes 100 W all the time, and trains for 6 s."""
    events: list[Event] = [SystemSampled(20.0, 0, {"system/gpu_0_energy_joules": 2000.0})]
    for number, event in enumerate(epochs(0.5, 0.7, 0.9)):
        now = 20.0 + number + evaluation * (number + 1) // 2
        events += [event, SystemSampled(now, number, {"system/gpu_0_energy_joules": 100 * now})]
    objective = Objective("energy", ACCURACY, 0.9)
    assert objective.value(folded(events, ACCURACY)) == pytest.approx(600.0)
    assert objective.cannot_beat(folded(events, ACCURACY), 590.0, 1.0)
    assert not objective.cannot_beat(folded(events, ACCURACY), 610.0, 1.0)


def test_samples_per_joule_count_the_first_steps_where_no_sample_came_before() -> None:
    energy = SystemSampled(0.0, 0, {"system/gpu_0_energy_joules": 60.0})
    curve = folded([*epochs(0.5, 0.7), energy], ACCURACY)
    assert curve.samples_per_joule == pytest.approx(20 * 3 / 60.0)


def test_a_trial_too_short_for_a_steady_speed_has_that_of_all_its_steps() -> None:
    curve = folded(epochs(0.5, 0.7), ACCURACY)
    objective = Objective("throughput", ACCURACY, None)
    assert objective.value(curve) == pytest.approx(-20 * 3 / 4.0)
    curve(RunEnded(200.0, "FINISHED", "", None, {"samples_per_second": 200.0}))
    assert objective.value(curve) == -200.0


def test_energy_counts_the_steps_before_the_first_speed() -> None:
    name = "system/gpu_0_energy_joules"
    events: list[Event] = [
        SystemSampled(0.0, 0, {name: 3000.0}),
        StepsLogged([1], [0.0], {"train/loss": [1.0]}),
        SystemSampled(0.0, 1, {name: 3040.0}),
        StepsLogged([5], [1.0], {"train/loss": [1.0]}),
        StepsLogged([10], [2.0], {"throughput/step_seconds": [0.2], SPEED: [80.0]}),
        SystemSampled(0.0, 2, {name: 3080.0}),
    ]
    curve = folded(events, ACCURACY)
    assert (curve.training_joules, curve.seconds) == (80.0, 2.0)
    assert curve.samples_per_joule == 9 * 16 / 80.0
    short = folded(events[:1] + events[4:], ACCURACY)
    assert short.samples_per_joule == 10 * 16 / 3080.0


def test_the_metric_is_interpolated_between_evaluations() -> None:
    curve = folded(epochs(0.5, 0.7, 0.9), ACCURACY)
    assert curve.seconds_to(0.8) == pytest.approx(5.0)
    assert curve.seconds_to(0.9) == pytest.approx(6.0)
    assert curve.seconds_to(0.3) == pytest.approx(
        2.0
    )  # nothing is known before the first evaluation
    assert curve.seconds_to(0.95) is None


def test_a_target_that_is_missed_by_rounding_is_reached() -> None:
    curve = folded(epochs(0.5, 0.8999999761581421, 0.95), ACCURACY)
    assert curve.seconds_to(0.9) == 4.0
    short = folded(epochs(0.5, 0.8999999761581421), ACCURACY)
    assert short.gap(0.9) <= 0 < short.gap(0.91)


def test_interpolation_starts_from_the_best_value_after_a_dip() -> None:
    curve = folded(epochs(0.6, 0.2, 0.8), ACCURACY)
    assert curve.seconds_to(0.7) == pytest.approx(
        5.0
    )  # from 0.6 at the dip's time, which is the best so far


def test_a_loss_is_better_if_lower() -> None:
    goal = Goal("val/accuracy", "min")
    curve = folded(epochs(0.9, 0.5), goal)
    assert curve.seconds_to(0.7) == pytest.approx(3.0) and curve.gap(0.4) == pytest.approx(0.2)
    assert folded(epochs(float("inf")), goal).gap(0.4) == 1.0


@pytest.mark.parametrize("target", [-150.0, 0.0, 0.9])
def test_no_value_is_further_off_than_one_below_0(target: float) -> None:
    gaps = [folded(epochs(best), ACCURACY).gap(target) for best in (-200.0, -1500.0, float("nan"))]
    assert 0 < gaps[0] < gaps[1] < gaps[2] == 1.0


def test_nan_never_reaches_anything() -> None:
    curve = folded(epochs(float("nan"), float("nan")), ACCURACY)
    assert curve.best is None and curve.seconds_to(0.1) is None and curve.gap(0.5) == 1.0


def test_the_speed_comes_from_the_runs_end() -> None:
    curve = LearningCurve(ACCURACY)
    curve(RunEnded(1.0, "FINISHED", "done", None, {"samples_per_second": 12.0}))
    assert curve.samples_per_second == 12.0


SHARES = st.floats(0, 1, width=16)  # no two differ by rounding alone


@given(st.lists(SHARES, min_size=1, max_size=12), SHARES, SHARES)
def test_a_higher_target_takes_longer(values: list[float], one: float, other: float) -> None:
    curve = folded(epochs(*values), ACCURACY)
    low, high = sorted((one, other))
    soon, late = curve.seconds_to(low), curve.seconds_to(high)
    if late is not None:
        assert soon is not None and soon <= late + 1e-9
    assert (curve.seconds_to(high) is not None) == (max(values) >= high)

"""Which knobs of speed are kept, on machines with known effects, noise and drift."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankzero import Train
from rankzero.tuning.knobs import MEASURED
from rankzero.tuning.probe import speed_knobs
from rankzero.tuning.probe.grid import Cell, ProbeResult, Status
from rankzero.tuning.probe.speed_knobs import LEAST_GAIN, Effect, Subject, Value
from rankzero.tuning.trials.describe import ExperimentDescription

DESCRIBED = ExperimentDescription(
    *("Mine", (), {}, 0.5, 2, 10**5, True, ("fp32",), "cpu", ""), cores=8, loads=True, images=True
)
SUBJECT = Subject(Train(epochs=10, batch_size=64), DESCRIBED)
KNEE = ProbeResult(
    64, 32, "fp32", "ok", 1000.0, 0.01, data_wait_fraction=0.3, communication_fraction=0.3
)
ONE, FOUR = (Value("workers", {"train.workers": count}) for count in (1, 4))


def block(cell: Cell, speed: float, status: Status = "ok", noise: float = 0.005) -> ProbeResult:
    fields = dataclasses.asdict(cell)
    return ProbeResult(**fields, status=status, samples_per_second=speed, relative_half_width=noise)


def decide(
    measure: Callable[[Cell], ProbeResult],
    knobs: tuple[str, ...] = MEASURED,
    subject: Subject = SUBJECT,
) -> tuple[list[Effect], list[ProbeResult]]:
    """Measure until all is decided; return the effects and the measurements."""
    measured: list[ProbeResult] = []
    while True:
        cell, found = speed_knobs.replay(knobs, subject, KNEE, measured)
        if cell is None:
            return found, measured
        measured.append(measure(cell))
        assert len(measured) < 200, "does not end"


def machine(speeds: dict[str, float]) -> Callable[[Cell], ProbeResult]:
    """Return a machine where each setting multiplies the speed; a factor of 0 is refused."""

    def measure(cell: Cell) -> ProbeResult:
        factors = [speeds.get(f"{key}={value}", 1.0) for key, value in cell.settings.items()]
        if 0 in factors:
            return block(cell, 0.0, "refused")
        return block(cell, 1000.0 * math.prod(factors))

    return measure


def test_what_gains_is_kept_and_added_up() -> None:
    speeds = {"train.workers=4": 1.5, "train.compile=True": 1.2, "train.channels_last=True": 0.8}
    found, _ = decide(machine({**speeds, "train.strategy=fsdp": 0}))
    assert speed_knobs.decided(found) == {"train.workers": 4, "train.compile": True}
    gains = {one.name: one.gain for one in found if one.decision == "kept"}
    assert gains == pytest.approx({"workers 4": 1.5, "compile": 1.2})
    assert [one.decision for one in found if one.name == "strategy fsdp"] == ["refused"]


def test_a_value_that_does_not_go_with_a_better_one_is_left_out() -> None:
    def measure(cell: Cell) -> ProbeResult:
        compiled, last = "train.compile" in cell.settings, "train.channels_last" in cell.settings
        return block(cell, 1000.0 * (1.5 if compiled else 1.1 if last else 1.0))

    found, _ = decide(measure, ("compile", "channels_last"))
    assert speed_knobs.decided(found) == {"train.compile": True}
    assert found[1].decision == "no gain" and found[1].gain == pytest.approx(1.0)


def test_the_cheapest_of_equally_good_values_is_kept() -> None:
    none = dataclasses.replace(SUBJECT, train=Train(batch_size=64, workers=0))
    speeds = {"train.workers=1": 1.2, "train.workers=2": 1.4, "train.workers=4": 1.402}
    found, _ = decide(machine(speeds), ("workers",), none)
    assert speed_knobs.decided(found) == {"train.workers": 2}
    assert [one.decision for one in found] == ["not chosen", "kept", "not chosen"]


def test_the_next_value_is_kept_if_the_best_was_only_lucky() -> None:
    speeds = iter([1000, 1500, 1000, 1400, 1000, 1000, 1000, 1400, 1000])
    knobs = ("ddp.bucket_mb",)
    found, _ = decide(lambda cell: block(cell, next(speeds)), knobs)
    assert [one.decision for one in found] == ["no gain", "kept"]


def test_the_best_value_comes_first_also_after_one_that_failed() -> None:
    speeds = {"train.workers=1": 1.1, "train.compile=True": 0, "train.channels_last=True": 1.3}
    _, measured = decide(machine(speeds), ("workers", "compile", "channels_last"))
    tried = [one.settings for one in measured if one.settings]
    assert tried[4] == {"train.channels_last": True}, "four values alone, then the best"


def test_a_value_that_failed_is_measured_again_alone() -> None:
    speeds = {"train.workers=1": 1.1, "train.compile=True": 0, "train.channels_last=True": 1.3}
    knobs = ("workers", "compile", "channels_last")
    found, measured = decide(machine(speeds), knobs)
    kept = [one for one in measured if one.status == "ok"]
    cell, _ = speed_knobs.replay(knobs, SUBJECT, KNEE, kept)
    assert cell is not None and cell.settings == {"train.compile": True}
    again = [*kept, machine(speeds)(cell)]
    assert speed_knobs.replay(knobs, SUBJECT, KNEE, again) == (None, found)


def test_loading_processes_are_added_only_if_steps_wait_for_data() -> None:
    calm = dataclasses.replace(KNEE, data_wait_fraction=0.0)
    # 3 is the default with 8 cores and 2 processes.
    assert speed_knobs.values("workers", SUBJECT, calm) == [ONE]
    assert speed_knobs.values("workers", SUBJECT, KNEE) == [ONE, FOUR]


def test_compiling_must_pay_within_one_run_of_the_user() -> None:
    def measure(cell: Cell) -> ProbeResult:
        compiled = "train.compile" in cell.settings
        one = block(cell, 1200.0 if compiled else 1000.0)
        return dataclasses.replace(one, setup_seconds=40.0 if compiled else 1.0)

    # 100 s, of which it saves 17.
    short = Subject(SUBJECT.train, dataclasses.replace(DESCRIBED, samples=10**4))
    (found,), _ = decide(measure, ("compile",), short)
    assert found.decision == "does not pay" and "39 s longer to start" in found.reason
    assert speed_knobs.decided(decide(measure, ("compile",))[0]) == {"train.compile": True}


@pytest.mark.parametrize("drift", [0.99, 1.01])
def test_drift_decides_nothing(drift: float) -> None:
    speed = 1000.0

    def measure(cell: Cell) -> ProbeResult:
        nonlocal speed
        speed *= drift
        return block(cell, speed, noise=0.0)

    found, _ = decide(measure)
    assert speed_knobs.decided(found) == {}


def test_noise_alone_is_seldom_kept() -> None:
    random_ = random.Random(0)
    kept = 0
    for _ in range(200):
        found, _ = decide(lambda cell: block(cell, random_.gauss(1000.0, 20.0), noise=0.01))
        kept += bool(speed_knobs.decided(found))
    assert kept <= 10


def test_a_model_that_takes_long_to_build_does_not_hold_up_the_search() -> None:
    def measure(cell: Cell) -> ProbeResult:
        gain = 1.5 if cell.settings.get("train.workers") == 4 else 1.0
        return dataclasses.replace(block(cell, 1000.0 * gain), seconds=40.0)

    found, measured = decide(measure, MEASURED)
    assert len(measured) <= 13
    assert speed_knobs.decided(found) == {"train.workers": 4}
    assert [one.decision for one in found[-3:]] == ["no time"] * 3


def test_knobs_without_a_cause_are_not_measured() -> None:
    alone = dataclasses.replace(DESCRIBED, processes=1, loads=False, images=False, batch_norm=True)
    subject = Subject(Train(), alone)
    knobs = ("workers", "channels_last", "strategy", "ddp.bucket_mb", "micro_batch")
    found, measured = decide(machine({}), knobs, subject)
    assert not measured and {one.decision for one in found} == {"refused"}
    assert all(one.reason for one in found)


def test_measurements_of_another_knee_or_of_other_knobs_are_not_used() -> None:
    _, measured = decide(machine({}), ("compile",))
    other = dataclasses.replace(KNEE, batch_size=128)
    assert speed_knobs.replay(("compile",), SUBJECT, KNEE, measured)[0] is None
    assert speed_knobs.replay(("compile",), SUBJECT, other, measured)[0] is not None
    assert speed_knobs.replay(("recompute",), SUBJECT, KNEE, measured)[0] is not None


@settings(max_examples=200)
@given(
    st.randoms(use_true_random=False),
    st.lists(st.sampled_from(MEASURED), unique=True, min_size=1).map(tuple),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_whatever_is_measured(
    drawn: random.Random, knobs: tuple[str, ...], processes: int, loads: bool
) -> None:
    """It ends, measures each value at most twice, and keeps none that lost."""

    def measure(cell: Cell) -> ProbeResult:
        status = drawn.choices(["ok", "failed", "out of memory", "refused"], [8, 1, 1, 1])[0]
        speed, noise = drawn.uniform(500, 2000), drawn.choice([0.001, 0.1, math.inf])
        one = block(cell, speed, cast("Status", status), noise)
        return dataclasses.replace(one, seconds=drawn.uniform(0, 100))

    described = dataclasses.replace(DESCRIBED, processes=processes, loads=loads)
    subject = Subject(SUBJECT.train, described)
    found, measured = decide(measure, knobs, subject)
    values = (one for knob in knobs for one in speed_knobs.values(knob, subject, KNEE))
    tried = [one for one in values if not one.refusal]
    # Once alone and once with others, each with a block of the settings without it.
    assert len(measured) <= 1 + 2 * len(tried) + 3 * len(tried)
    for one in found:
        if one.decision == "kept":
            assert one.low > 1 and one.gain >= 1 + LEAST_GAIN
    kept = [one.knob for one in found if one.decision == "kept"]
    assert len(set(kept)) == len(kept)

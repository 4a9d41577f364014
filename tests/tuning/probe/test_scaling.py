"""The scaling curve, and its prediction beyond the devices that were measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.probe.scaling import Scaling, fitted, scaling


def cell(
    devices: int, batch: int, speed: float, precision: str = "fp32", half: float = 0.03
) -> ProbeResult:
    share = 0.1 * (devices - 1)
    return ProbeResult(
        *(batch, batch, precision, "ok", speed, half), communication_fraction=share, devices=devices
    )


def curve(*seconds: tuple[int, float]) -> Scaling:
    found = scaling([cell(count, 64, 64 / took) for count, took in seconds])
    assert found is not None
    return found


@given(
    st.tuples(*(st.floats(0.1, 1.0), st.floats(0.0, 0.5), st.floats(0.0, 0.05))),
    st.sampled_from([(1, 2, 4), (1, 2, 4, 8), (2, 3, 8)]),
)
def test_the_fit_finds_the_law_that_made_the_times(
    factors: tuple[float, float, float], counts: tuple[int, ...]
) -> None:
    a, b, c = factors
    found = fitted({count: a / count + b + c * count for count in counts})
    for count in (*counts, 2 * counts[-1]):
        terms = zip(found, (1 / count, 1.0, count), strict=True)
        assert sum(x * y for x, y in terms) == pytest.approx(a / count + b + c * count, rel=0.02)
    assert min(found) >= 0


def test_the_curve_is_of_the_largest_batch_that_all_numbers_have() -> None:
    found = scaling(
        [
            *(cell(1, 32, 100.0), cell(1, 64, 110.0), cell(1, 64, 120.0, "bf16")),
            *(cell(2, 32, 150.0), cell(2, 64, 180.0), cell(2, 128, 300.0)),
        ]
    )
    assert found is not None and found.batch_size == 64
    one, two, four, eight = found.points
    assert (one.samples_per_second, one.speed_up, one.efficiency) == (120.0, 1.0, 1.0)
    assert two.speed_up == 1.5 and two.efficiency == 0.75 and two.communication == 0.1
    assert (four.devices, eight.devices) == (4, 8) and four.is_predicted and eight.is_predicted
    assert two.samples_per_second < four.samples_per_second < 4 * 120.0
    assert two.row == ["2", "180", "1.5x ± 4%", "75%", "10% of a step", "measured"]
    assert four.row[-1] == "prediction"
    text = "By the probe, batch 64 is 1.5x as fast (± 4%) on 2 devices as on 1: 75% efficiency, "
    assert found.sentence().startswith(f"{text}10% of a step is communication.")


def test_one_number_of_devices_or_no_common_batch_has_no_curve() -> None:
    assert scaling([]) is None and scaling([cell(4, 64, 100.0)]) is None
    assert scaling([cell(1, 32, 100.0), cell(2, 64, 150.0)]) is None


def test_a_disturbed_measurement_is_no_base_for_a_curve() -> None:
    disturbed = [cell(1, 64, 5.0, half=2.7), cell(2, 64, 180.0)]
    assert scaling(disturbed) is None
    found = scaling([*disturbed, cell(1, 32, 100.0), cell(2, 32, 150.0)])
    assert found is not None and found.batch_size == 32


def test_where_the_next_device_no_longer_pays() -> None:
    assert curve((1, 1.0), (2, 1.1)).pays_up_to == 1
    assert "no longer pays after 1." in curve((1, 1.0), (2, 1.1)).sentence()
    # Amdahl's law with a = 0.8, b = 0.2: n t(n)^2 is least at n = a / b.
    amdahl = curve((1, 1.0), (2, 0.6))
    assert amdahl.pays_up_to == 4 and "after 4 (prediction)." in amdahl.sentence()
    # 1 and 8 devices were measured, and no number between them.
    assert "after 3 (prediction)." in curve((1, 1.0), (8, 0.35)).sentence()
    assert "still pays (prediction)" in curve((1, 1.0), (2, 0.5), (4, 0.25)).sentence()

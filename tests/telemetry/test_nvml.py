"""The GPU sampler against NVML, through the real pynvml.

A stub in C answers with recorded values of a real card (`recorded_gpu.json`). The tests of every
driver also use the installed one if there is a GPU. Each probe is a process of its own, because a
process can load only one NVML.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml
import pytest

from support.paths import SUPPORT
from support.stubbed_nvml import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    MIB,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNKNOWN,
    card,
    compile_stub,
    mig_card,
    mig_uuid,
    uuid,
)

# The environment of the tests must not decide what a probe sees.
INHERITED = {
    key: value
    for key, value in os.environ.items()
    if key not in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
}

PROBE = """
import json, os, sys, time
from rankzero.telemetry.nvml import GpuSampler
uuids, count, pause = json.loads(sys.argv[1])
sampler = GpuSampler(uuids, os.environ)
samples = []
for _ in range(count):
    samples.append(sampler.sample())
    time.sleep(pause)
sampler.close()
sampler.close()
print(json.dumps([samples, sampler.notices, sampler.describe()]))
"""


@dataclasses.dataclass(frozen=True)
class Seen:
    samples: list[dict[str, float]]
    notices: list[str]
    devices: dict[str, str]


def run(environment: Mapping[str, str], *arguments: str | Path) -> Any:
    command = [sys.executable, "-W", "error", *arguments]
    result = subprocess.run(
        command,
        env={**INHERITED, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def probe(
    environment: Mapping[str, str],
    uuids: Sequence[str] | None = None,
    samples: int = 1,
    pause_seconds: float = 0.0,
) -> Seen:
    return Seen(*run(environment, "-c", PROBE, json.dumps([uuids, samples, pause_seconds])))


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return compile_stub(tmp_path_factory.mktemp("nvml"))


def installed_gpus() -> int:
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


DRIVERS = ["stub", *(["installed"] if installed_gpus() else [])]


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, stub: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process that finds a driver with at least one GPU."""
    return {"stub": {**stub, **card(0), **card(1, "whole_idle")}, "installed": {}}[request.param]


class TestEveryDriver:
    """Tests of any driver with a GPU."""

    def test_names_are_in_mlflows_style(self, driver: dict[str, str]) -> None:
        seen = probe(driver)
        assert seen.samples[0] and seen.notices == []
        units = "percentage(_min|_max)?|megabytes|watts|celsius(_max)?|megahertz|joules"
        for name in seen.samples[0]:
            assert re.fullmatch(rf"gpu_([0-9]+_)?[a-z_]+_({units})", name), name

    def test_values_are_possible(self, driver: dict[str, str]) -> None:
        for name, value in probe(driver).samples[0].items():
            assert value >= 0
            # The power of a moment may exceed the limit, which is kept on average.
            assert value <= (150 if "power" in name else 100) or "percentage" not in name, (
                name,
                value,
            )

    def test_energy_never_falls(self, driver: dict[str, str]) -> None:
        samples = probe(driver, samples=4, pause_seconds=0.05).samples
        for before, after in itertools.pairwise(samples):
            joules = [name for name in before if name.endswith("_energy_joules")]
            assert joules and all(before[name] <= after[name] for name in joules)

    def test_agrees_with_mlflows_own_monitor(self, driver: dict[str, str]) -> None:
        theirs, ours = run(driver, SUPPORT / "mlflow_monitors.py", "GPU"), probe(driver).samples[0]
        assert theirs
        for name, value in theirs.items():
            assert name in ours
            # The load of a real GPU changes between the two readings.
            if "memory" in name:
                assert ours[name] == pytest.approx(value, rel=0.02, abs=0.06)

    def test_the_chosen_gpu_is_ordinal_0(self, driver: dict[str, str]) -> None:
        last = list(probe(driver).devices.values())[-1]
        name, chosen, _ = last.split(", ")
        for seen in (probe(driver, [chosen]), probe({**driver, "CUDA_VISIBLE_DEVICES": chosen})):
            assert seen.devices == {"gpu_0": last} and name in last
            assert all(metric.startswith("gpu_0_") for metric in seen.samples[0])

    def test_no_gpu_is_no_gpu(self, driver: dict[str, str]) -> None:
        for seen in (probe(driver, []), probe({**driver, "CUDA_VISIBLE_DEVICES": ""})):
            assert seen == Seen([{}], [], {})

    def test_an_unknown_uuid_is_a_notice_and_keeps_its_ordinal(
        self, driver: dict[str, str]
    ) -> None:
        known = probe(driver).devices["gpu_0"].split(", ")[1]
        seen = probe(driver, ["GPU-unknown", known])
        assert list(seen.devices) == ["gpu_1"]
        assert seen.notices == ["no metrics of GPU 0: the driver does not list GPU-unknown"]


def test_readings_are_the_recorded_ones(stub: dict[str, str]) -> None:
    seen = probe({**stub, **card(0)}, samples=2)
    assert seen.devices == {"gpu_0": f"NVIDIA H200, {uuid(0)}, index 0"}
    assert seen.samples[1] == pytest.approx(
        {
            "gpu_0_utilization_percentage": 100,
            "gpu_0_memory_usage_percentage": (143771 - 110796) / 143771 * 100,
            "gpu_0_memory_usage_megabytes": (143771 - 110796) * MIB / 1e6,
            "gpu_0_power_usage_watts": 627.40,
            "gpu_0_power_usage_percentage": 627.40 / 700 * 100,
            "gpu_0_temperature_celsius": 52,
            "gpu_0_sm_clock_megahertz": 1980,
            "gpu_0_throttled_power_percentage": 0,
            "gpu_0_throttled_thermal_percentage": 0,
            "gpu_0_throttled_hardware_percentage": 0,
            # Since the sampler began, not since the driver did.
            "gpu_0_energy_joules": 1.255,
        }
    )


def test_several_gpus_are_summarised(stub: dict[str, str]) -> None:
    sample = probe({**stub, **card(0), **card(1, "whole_idle")}, samples=2).samples[1]
    summary = {name: value for name, value in sample.items() if not re.match("gpu_[0-9]", name)}
    assert summary == pytest.approx(
        {
            "gpu_utilization_percentage": 50,
            "gpu_utilization_percentage_min": 0,
            "gpu_memory_usage_percentage_max": (143771 - 110796) / 143771 * 100,
            "gpu_temperature_celsius_max": 52,
            "gpu_power_usage_watts": 627.40 + 77.71,
            "gpu_energy_joules": 2 * 1.255,
        }
    )


@pytest.mark.parametrize(
    ("reasons", "power", "thermal", "hardware"),
    [
        ("0x1", 0, 0, 0),
        ("0x4", 100, 0, 0),
        ("0x88", 100, 0, 100),
        ("0x20", 0, 100, 0),
        ("0x48", 0, 100, 100),
    ],
)
def test_each_reason_of_throttling_has_a_metric(
    stub: dict[str, str], reasons: str, power: int, thermal: int, hardware: int
) -> None:
    (sample,) = probe({**stub, **card(0, nvmlDeviceGetCurrentClocksEventReasons=reasons)}).samples
    seen = [
        sample[f"gpu_0_throttled_{reason}_percentage"]
        for reason in ("power", "thermal", "hardware")
    ]
    assert seen == [power, thermal, hardware]


CALLS = {
    "nvmlDeviceGetUtilizationRates": {"utilization_percentage"},
    "nvmlDeviceGetMemoryInfo_total": {"memory_usage_percentage", "memory_usage_megabytes"},
    "nvmlDeviceGetPowerUsage": {"power_usage_watts", "power_usage_percentage"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_usage_percentage"},
    "nvmlDeviceGetTemperature": {"temperature_celsius"},
    "nvmlDeviceGetClockInfo": {"sm_clock_megahertz"},
    "nvmlDeviceGetCurrentClocksEventReasons": {
        f"throttled_{reason}_percentage" for reason in ("power", "thermal", "hardware")
    },
}


def test_only_unsupported_readings_are_left_out(stub: dict[str, str]) -> None:
    """One card for each call, and each card lacks that one; the last lacks none."""
    environment = dict(stub)
    for number, call in enumerate(CALLS):
        environment |= card(number, **{call: NOT_SUPPORTED})
    environment |= card(len(CALLS))
    seen = probe(environment, samples=2)
    assert seen.notices == []
    for sample in seen.samples:
        found = dict[int, set[str]]()
        for name in sample:
            if match := re.fullmatch(r"gpu_(\d+)_(.+)", name):
                found.setdefault(int(match[1]), set()).add(match[2])
        for number, missing in enumerate(CALLS.values()):
            assert found[number] == found[len(CALLS)] - missing


def test_a_sum_that_lacks_a_card_is_left_out(stub: dict[str, str]) -> None:
    (sample,) = probe({**stub, **card(0), **card(1, nvmlDeviceGetPowerUsage=NOT_SUPPORTED)}).samples
    assert "gpu_power_usage_watts" not in sample and "gpu_0_power_usage_watts" in sample


def test_a_reading_that_fails_once_is_tried_again(stub: dict[str, str]) -> None:
    script = {
        "nvmlDeviceGetUtilizationRates": f"100,{UNKNOWN},99",
        "nvmlDeviceGetPowerUsage": f"{UNKNOWN},627400",
    }
    samples = probe({**stub, **card(0, **script)}, samples=3).samples
    assert [sample.get("gpu_0_utilization_percentage") for sample in samples] == [100, None, 99]
    assert [sample.get("gpu_0_power_usage_percentage") for sample in samples] == [
        None,
        *[pytest.approx(89.63, abs=0.01)] * 2,
    ]


def test_readings_that_fail_repeatedly_are_one_notice_for_each_gpu(stub: dict[str, str]) -> None:
    failing = {
        "nvmlDeviceGetTemperature": f"52,{UNKNOWN}",
        "nvmlDeviceGetPowerUsage": f"627400,627400,{UNKNOWN}",
    }
    seen = probe({**stub, **card(0), **card(1, **failing)}, samples=8)
    (notice,) = seen.notices
    assert notice.startswith(
        f"GPU 1 (NVIDIA H200, {uuid(1)}, index 1) lacks some metrics: temperature: "
    )
    assert (
        "gpu_1_temperature_celsius" not in seen.samples[-1]
        and "gpu_1_sm_clock_megahertz" in seen.samples[-1]
    )


def test_a_reading_that_fails_now_and_then_is_no_notice(stub: dict[str, str]) -> None:
    failing = {"nvmlDeviceGetTemperature": f"52,{UNKNOWN},{UNKNOWN},52,{UNKNOWN},{UNKNOWN},52"}
    assert probe({**stub, **card(0, **failing)}, samples=7).notices == []


@pytest.mark.parametrize("error", [GPU_IS_LOST, RESET_REQUIRED])
def test_a_lost_gpu_is_one_notice_and_the_others_are_still_read(
    stub: dict[str, str], error: str
) -> None:
    lost = card(1, nvmlDeviceGetTemperature=f"52,52,{error}")
    seen = probe({**stub, **card(0), **lost, **card(2)}, samples=6)
    per_sample = [
        {name[:5] for name in sample if re.match("gpu_[0-9]", name)} for sample in seen.samples
    ]
    assert per_sample == [{"gpu_0", "gpu_1", "gpu_2"}] * 2 + [{"gpu_0", "gpu_2"}] * 4
    (notice,) = seen.notices
    assert notice.startswith(f"GPU 1 (NVIDIA H200, {uuid(1)}, index 1) gives no more metrics: GPU ")
    # Their energy would seem to fall, so there is no sum any more.
    assert "gpu_energy_joules" in seen.samples[0] and "gpu_energy_joules" not in seen.samples[-1]
    assert seen.samples[-1]["gpu_utilization_percentage"] == 100


def test_a_gpu_that_is_lost_from_the_start_is_not_listed(stub: dict[str, str]) -> None:
    environment = {
        **stub,
        **card(0),
        **card(1),
        "nvmlDeviceGetHandleByIndex_gpu0": GPU_IS_LOST,
        "nvmlDeviceGetHandleByIndex": "0",
    }
    seen = probe(environment)
    assert seen.devices == {"gpu_0": f"NVIDIA H200, {uuid(1)}, index 1"}


class TestEnergy:
    def test_is_integrated_from_power_without_a_counter(self, stub: dict[str, str]) -> None:
        environment = {**stub, **card(0, nvmlDeviceGetTotalEnergyConsumption=NOT_SUPPORTED)}
        first, *_, last = [
            s["gpu_0_energy_joules"]
            for s in probe(environment, samples=5, pause_seconds=0.05).samples
        ]
        assert first == 0
        # The pauses are at least that long.
        assert last >= 627.40 * 4 * 0.05 * 0.99

    def test_counts_the_time_in_which_power_failed(self, stub: dict[str, str]) -> None:
        script = {
            "nvmlDeviceGetTotalEnergyConsumption": NOT_SUPPORTED,
            "nvmlDeviceGetPowerUsage": f"500000,{UNKNOWN},500000",
        }
        samples = probe({**stub, **card(0, **script)}, samples=3, pause_seconds=0.1).samples
        assert "gpu_0_energy_joules" not in samples[1]
        assert samples[2]["gpu_0_energy_joules"] >= 500 * 0.2 * 0.99

    def test_survives_a_counter_that_restarts(self, stub: dict[str, str]) -> None:
        environment = {**stub, **card(0, nvmlDeviceGetTotalEnergyConsumption="5000,8000,1000,2500")}
        assert [s["gpu_0_energy_joules"] for s in probe(environment, samples=3).samples] == [
            3.0,
            3.0,
            4.5,
        ]


class TestMig:
    """A partitioned card: five compute instances, of which the first two share a GPU instance."""

    def test_a_device_has_its_own_memory_and_the_cards_power(self, stub: dict[str, str]) -> None:
        seen = probe({**stub, **mig_card(0)}, [mig_uuid(2)])
        assert seen.devices == {"gpu_0": f"NVIDIA H200 MIG 2g.35gb, {mig_uuid(2)}, index 0"}
        sample = seen.samples[0]
        assert sample["gpu_0_memory_usage_megabytes"] == pytest.approx((33280 - 33264) * MIB / 1e6)
        assert sample["gpu_0_memory_usage_percentage"] == pytest.approx(
            (33280 - 33264) / 33280 * 100
        )
        assert sample["gpu_0_power_usage_watts"] == pytest.approx(295.01)
        assert sample["gpu_0_temperature_celsius"] == 36
        assert "gpu_0_utilization_percentage" not in sample
        assert seen.notices == []

    def test_the_cards_power_counts_once(self, stub: dict[str, str]) -> None:
        (sample,) = probe({**stub, **mig_card(0)}, [mig_uuid(3), mig_uuid(4)]).samples
        assert "gpu_1_memory_usage_megabytes" in sample and "gpu_1_power_usage_watts" not in sample
        assert sample["gpu_power_usage_watts"] == pytest.approx(295.01)

    def test_two_cards_have_two_powers(self, stub: dict[str, str]) -> None:
        (sample,) = probe(
            {**stub, **mig_card(0), **mig_card(1)}, [mig_uuid(0), mig_uuid(5)]
        ).samples
        assert sample["gpu_power_usage_watts"] == pytest.approx(2 * 295.01)

    @pytest.mark.parametrize("visible", [None, "0", uuid(0), mig_uuid(0), f"MIG-{uuid(0)}/2/0"])
    def test_cuda_opens_the_first_device(self, stub: dict[str, str], visible: str | None) -> None:
        environment = {**stub, **mig_card(0), **card(1)}
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        assert probe(environment).devices == {
            "gpu_0": f"NVIDIA H200 MIG 1c.3g.71gb, {mig_uuid(0)}, index 0"
        }


class TestWithoutADriver:
    def test_a_driver_that_is_not_loaded(self, stub: dict[str, str]) -> None:
        seen = probe({**stub, "nvmlInitWithFlags": DRIVER_NOT_LOADED}, samples=3)
        assert seen == Seen([{}, {}, {}], ["no GPU metrics: Driver Not Loaded"], {})

    def test_a_file_that_is_no_library(self, tmp_path: Path) -> None:
        (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
        seen = probe({"LD_LIBRARY_PATH": str(tmp_path)}, samples=2)
        assert seen == Seen([{}, {}], ["no GPU metrics: NVML Shared Library Not Found"], {})

    def test_no_cards(self, stub: dict[str, str]) -> None:
        assert probe(stub) == Seen([{}], [], {})

    def test_no_binding(self, stub: dict[str, str]) -> None:
        hidden = "import sys; sys.modules['pynvml'] = None\n" + PROBE
        samples, notices, _ = run({**stub, **card(0)}, "-c", hidden, "[null, 1, 0]")
        assert samples == [{}] and notices == [
            "no GPU metrics: the package nvidia-ml-py is not installed"
        ]


def test_old_drivers_have_another_name_for_throttling(tmp_path: Path) -> None:
    old = compile_stub(tmp_path, "-DDRIVER_BEFORE_R535")
    environment = {**old, **card(0, nvmlDeviceGetCurrentClocksThrottleReasons="0x4")}
    assert probe(environment).samples[0]["gpu_0_throttled_power_percentage"] == 100


def test_the_new_call_for_the_temperature_is_tried(stub: dict[str, str]) -> None:
    answers = {"nvmlDeviceGetTemperature": "E13", "nvmlDeviceGetTemperatureV": "53"}
    assert probe({**stub, **card(0, **answers)}).samples[0]["gpu_0_temperature_celsius"] == 53

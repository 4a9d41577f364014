"""The counters of energy that Linux shows, as files of the same form."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankzero.telemetry.host import HostSampler
from rankzero.telemetry.rapl import ZONES, CpuEnergy


def zone(folder: Path, name: str, of: str, joules: float, largest: float = 1000.0) -> None:
    """Write a zone called `name`: the counter of `of`."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "name").write_text(f"{of}\n")
    (folder / name / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (folder / name / "max_energy_range_uj").write_text(f"{largest * 1e6:.0f}\n")


def joules(energy: CpuEnergy) -> float | None:
    return energy.sample().get("cpu_energy_joules")


def test_packages_and_their_memory_count_and_cores_do_not_count_twice(tmp_path: Path) -> None:
    def write(joules: float) -> None:
        zone(tmp_path, "intel-rapl:0", "package-0", 10 + joules)
        zone(tmp_path, "intel-rapl:0:0", "core", 5 + joules)
        zone(tmp_path, "intel-rapl:0:1", "dram", 1 + joules / 10)
        zone(tmp_path, "intel-rapl:1", "package-1", 20 + joules)
        zone(tmp_path, "intel-rapl:2", "psys", 40 + 3 * joules)

    write(0.0)
    energy = CpuEnergy(tmp_path)
    assert joules(energy) == 0.0
    write(50.0)
    assert joules(energy) == pytest.approx(105.0)


def test_a_counter_that_starts_again_loses_nothing(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 990.0)
    energy = CpuEnergy(tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", 15.0)
    assert joules(energy) == pytest.approx(25.0)
    zone(tmp_path, "intel-rapl:0", "package-0", 16.0)
    assert joules(energy) == pytest.approx(26.0)


def test_no_energy_is_stated_where_none_can_be_read(tmp_path: Path) -> None:
    assert joules(CpuEnergy(tmp_path / "none")) is None
    zone(tmp_path, "intel-rapl:0", "package-0", 10.0)
    energy = CpuEnergy(tmp_path)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("")
    assert joules(energy) is None
    assert joules(CpuEnergy(tmp_path)) is None


def test_the_host_shows_it_where_this_machine_has_it() -> None:
    has_it = joules(CpuEnergy(ZONES)) is not None
    assert ("cpu_energy_joules" in HostSampler().sample()) == has_it

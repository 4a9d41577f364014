"""Measuring the probe map, without processes."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from rankzero.errors import RunFailed
from rankzero.experiment import Experiment
from rankzero.launch import failures
from rankzero.launch.failures import Failure, FailureKind
from rankzero.tuning.probe import grid, probe_map
from rankzero.tuning.probe.grid import Cell, ProbeResult
from rankzero.tuning.probe.worker import ProbeRequest
from rankzero.tuning.space import make_space
from rankzero.tuning.trials.describe import ExperimentDescription

DESCRIBED = ExperimentDescription(
    *("Mine", (), {}, 0.5, 1, 1000, True, ("fp32",), "cpu", ""),
)
SPACE = make_space(Experiment(), 1, 0.5, ("fp32", "bf16"))


class BrokenHost:
    """Its processes end without a result."""

    is_starting = was_lost = False

    def run(self, *_: Any) -> None:
        pass

    def has_ended(self, _: float) -> bool:
        return True


class HangingHost:
    """Its processes begin a cell, and hang until they are killed."""

    is_starting = was_lost = False

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.requests: list[ProbeRequest] = []

    def run(self, _entry: object, _topology: object, request: ProbeRequest, *_: Path) -> None:
        self.requests.append(request)
        cell = request.next_cell(list(request.known))
        assert cell is not None
        request.append({"begun": dataclasses.asdict(cell)})

    def has_ended(self, _: float) -> bool:
        return len(self.signals) == len(self.requests)

    def signal(self, number: int, _written: object) -> None:
        self.signals.append(number)


class MeasuringHost:
    """Its processes measure all cells. It is lost in the first `losses` passes, at 256 samples."""

    is_starting = False

    def __init__(self, losses: int = 0) -> None:
        self.losses, self.was_lost = losses, False
        self.widths: dict[int, float] = {}
        self.measured: list[tuple[int, str]] = []

    def run(self, _entry: object, _topology: object, request: ProbeRequest, *_: Path) -> None:
        known = list(request.known)
        self.was_lost = False
        while cell := request.next_cell(known, time.monotonic()):
            fields = dataclasses.asdict(cell)
            request.append({"begun": fields})
            if self.ends_at(cell, request):
                return
            fields |= {"status": "ok", "samples_per_second": float(cell.batch_size)}
            width = self.widths.get(cell.batch_size, 0.01)
            fields |= {"relative_half_width": width, "memory_limit_bytes": 2**30}
            known.append(ProbeResult(**fields))
            request.append(dataclasses.asdict(known[-1]))
            self.measured.append((cell.batch_size, cell.precision))

    def ends_at(self, cell: Cell, _request: ProbeRequest) -> bool:
        """Return whether the processes end before they have measured this cell."""
        self.was_lost = self.losses > 0 and cell.batch_size == 256
        self.losses -= self.was_lost
        return self.was_lost

    def has_ended(self, _: float) -> bool:
        return True


def measured_with(
    host: object,
    folder: Path,
    lines: list[str] | None = None,
    described: ExperimentDescription = DESCRIBED,
    *,
    most_seconds: float = math.inf,
) -> list[ProbeResult]:
    notify = [] if lines is None else lines
    given = SPACE, described, "", folder, cast("Any", host), notify.append, 0.0
    return probe_map.measure(*given, most_seconds=most_seconds).cells


def test_a_later_command_measures_failed_cells_again_and_no_others(tmp_path: Path) -> None:
    with pytest.raises(RunFailed):
        measured_with(HangingHost(), tmp_path)
    host = MeasuringHost()
    whole = measured_with(host, tmp_path)
    assert {one.status for one in whole} == {"ok"} and len(host.measured) == len(whole)
    again = MeasuringHost()
    assert measured_with(again, tmp_path) == whole and not again.measured


class FullHost(MeasuringHost):
    """On several GPUs: the largest batch runs out of memory, and that ends its processes."""

    def __init__(self, kind: FailureKind) -> None:
        super().__init__()
        self.kind, self.full = kind, list[str]()

    def ends_at(self, cell: Cell, request: ProbeRequest) -> bool:
        is_full = cell.batch_size == max(SPACE.batch_sizes)
        if is_full:
            self.full.append(cell.precision)
            failures.write(Failure(time.time(), 0, "full", "", self.kind), request.failures)
        return is_full


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        (FailureKind.OUT_OF_MEMORY, []),
        (FailureKind.OUT_OF_HOST_MEMORY, ["fp32", "bf16"]),
    ],
)
def test_a_lack_of_a_gpus_memory_that_ended_the_processes_is_kept(
    tmp_path: Path, kind: FailureKind, again: list[str]
) -> None:
    whole = measured_with(FullHost(kind), tmp_path)
    assert {one.status for one in whole} == {"ok", "out of memory"}
    later = FullHost(kind)
    measured_with(later, tmp_path)
    assert (later.full, later.measured) == (again, [])


def test_a_study_that_has_its_space_measures_nothing(tmp_path: Path) -> None:
    # As on another machine, which takes over.
    assert measured_with(None, tmp_path, most_seconds=0) == []
    whole = measured_with(MeasuringHost(losses=2), tmp_path)
    assert "failed" in {one.status for one in whole}
    assert measured_with(None, tmp_path, most_seconds=0) == whole


def test_a_probe_ends_with_its_time_and_a_later_one_measures_the_rest(tmp_path: Path) -> None:
    host, lines = MeasuringHost(), list[str]()
    given = SPACE, DESCRIBED, "", tmp_path, cast("Any", host), lines.append, 0.0
    cut = probe_map.measure(*given, most_seconds=1e-9)
    assert len(cut.cells) == len(host.measured) == 1
    assert cut.is_cut
    assert "a third of --minutes" in lines[-1] and "`rankzero probe`" in lines[-1]
    assert len(measured_with(MeasuringHost(), tmp_path)) > 1


def test_a_failure_that_was_measured_again_does_not_count(tmp_path: Path) -> None:
    whole = measured_with(MeasuringHost(losses=2), tmp_path)
    assert "failed" in {one.status for one in whole}
    mended = measured_with(MeasuringHost(), tmp_path)
    assert {one.status for one in mended} == {"ok"}
    assert measured_with(MeasuringHost(), tmp_path, most_seconds=0) == mended


def test_a_map_that_a_busy_machine_spoiled_names_the_file_to_delete(tmp_path: Path) -> None:
    host, lines = MeasuringHost(), list[str]()
    host.widths = {256: 4.4}
    measured_with(host, tmp_path, lines)
    [path] = (tmp_path / "probes").glob("*.jsonl")
    assert lines[-1].startswith("probe  2 of ") and f"delete {path} and search" in lines[-1]
    path.unlink()
    measured_with(MeasuringHost(), tmp_path, lines := [])
    assert not any("delete" in line for line in lines)


def test_a_lack_of_memory_is_kept_if_the_device_has_a_limit() -> None:
    size = (64, 64, "fp32")
    without = ProbeResult(*size, "out of memory")
    assert not grid.is_lasting(without) and not grid.is_lasting(ProbeResult(*size, "refused"))
    assert grid.is_lasting(dataclasses.replace(without, memory_limit_bytes=1))


def test_one_search_at_a_time_measures_a_map(tmp_path: Path) -> None:
    second, told = MeasuringHost(), list[str]()

    class Meanwhile(MeasuringHost):
        def run(self, *given: Any) -> None:
            if not self.measured:
                thread.start()
                # The second either waits, or has ended.
                while thread.is_alive() and not told:
                    time.sleep(0.01)
            super().run(*given)

    thread = threading.Thread(target=measured_with, args=(second, tmp_path, told))
    first = Meanwhile()
    measured_with(first, tmp_path)
    thread.join()
    assert first.measured and not second.measured
    assert told == ["probe  another search measures this map: waiting"]


@pytest.mark.parametrize(("losses", "failures"), [(1, 0), (2, 1)])
def test_a_cell_whose_host_is_lost_is_measured_once_again(
    tmp_path: Path, losses: int, failures: int
) -> None:
    lines = list[str]()
    cells = measured_with(MeasuringHost(losses), tmp_path, lines)
    assert [one.status for one in cells].count("failed") == failures
    assert sum("failed" in line for line in lines) == failures
    if not failures:
        assert 256 in {one.batch_size for one in cells if one.precision == "fp32"}


def test_a_cell_that_hangs_is_killed_and_the_next_one_measured(tmp_path: Path) -> None:
    host, lines = HangingHost(), list[str]()
    with pytest.raises(RunFailed, match=r"on 1 device: no result for 0 s \(--silence-seconds\)"):
        measured_with(host, tmp_path, lines)
    assert set(host.signals) == {signal.SIGQUIT} and len(host.requests) > 1
    assert lines and all("failed: no result for 0 s" in line for line in lines)
    assert len({line.split("failed")[0] for line in lines}) == len(lines), "a cell was tried twice"


class SlowHost(HangingHost):
    """Its first cell takes batches, and has no result for long."""

    looks = 0

    def has_ended(self, _: float) -> bool:
        self.looks += 1
        self.requests[0].beat.write_text(str(self.looks))
        time.sleep(0.05)
        return self.looks > 8


def test_a_cell_that_takes_batches_is_alive(tmp_path: Path) -> None:
    host = SlowHost()
    with pytest.raises(RunFailed, match="no batch size could be measured"):
        probe_map.measure(SPACE, DESCRIBED, "", tmp_path, cast("Any", host), print, 0.2)
    assert host.looks > 8 and host.signals == []


class SuspendedHost(BrokenHost):
    """While it is looked at first, the search itself stands still for more than a second."""

    def __init__(self) -> None:
        self.signals, self.looks = list[int](), 0

    def has_ended(self, _: float) -> bool:
        self.looks += 1
        time.sleep(1.4 if self.looks == 1 else 0.0)
        return self.looks > 2

    def signal(self, number: int, _written: object) -> None:
        self.signals.append(number)


def test_the_time_in_which_the_search_stood_still_is_no_silence_of_a_cell(tmp_path: Path) -> None:
    host = SuspendedHost()
    with pytest.raises(RunFailed, match="no batch size could be measured on 1 device: see"):
        probe_map.measure(SPACE, DESCRIBED, "", tmp_path, cast("Any", host), print, 1.2)
    assert host.looks == 3 and host.signals == []


def test_a_number_of_devices_without_a_measurement_is_named(tmp_path: Path) -> None:
    space, host = make_space(Experiment(), 4, 0.5), cast("Any", BrokenHost())
    with pytest.raises(RunFailed, match=r"no batch size could be measured on 4 devices: see "):
        probe_map.measure(space, DESCRIBED, "", tmp_path, host, print, 60.0)


def test_a_map_belongs_to_its_processor_its_share_of_the_cores_and_its_code(tmp_path: Path) -> None:
    maps = list[Path]()
    for described in (
        DESCRIBED,
        dataclasses.replace(DESCRIBED, cores=2),
        dataclasses.replace(DESCRIBED, processor="EPYC 9654"),
        dataclasses.replace(DESCRIBED, code="of another model"),
        dataclasses.replace(DESCRIBED, cores=2),
    ):
        host = HangingHost()
        # A known map has no cell left, so each is measured below a folder of its own.
        with pytest.raises(RunFailed):
            folder = tmp_path / str(len(maps))
            measured_with(host, folder, described=described)
        maps.append(host.requests[0].results.relative_to(folder))
    assert len(set(maps)) == 4 and maps[1] == maps[4]

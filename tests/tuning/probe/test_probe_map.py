"""Measuring the probe map, without processes."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from rankzero.errors import RunFailed
from rankzero.experiment import Experiment
from rankzero.tuning.probe import probe_map
from rankzero.tuning.probe.worker import ProbeRequest
from rankzero.tuning.space import make_space
from rankzero.tuning.trials.describe import ExperimentDescription

DESCRIBED = ExperimentDescription(
    *("Mine", (), {}, 0.5, 1, 1000, True, ("fp32",), "cpu", ""),
)
SPACE = make_space(Experiment(), 1, 0.5, ("fp32", "bf16"))


class BrokenHost:
    """Its processes end without a result."""

    is_starting = False

    def run(self, *_: Any) -> None:
        pass

    def has_ended(self, _: float) -> bool:
        return True


class HangingHost:
    """Its processes begin a cell, and hang until they are killed."""

    is_starting = False

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


def test_a_cell_that_hangs_is_killed_and_the_next_one_measured(tmp_path: Path) -> None:
    host, lines = HangingHost(), list[str]()
    with pytest.raises(RunFailed, match=r"on 1 device: no result for 0 s \(--silence-seconds\)"):
        probe_map.measure(SPACE, DESCRIBED, "", tmp_path, cast("Any", host), lines.append, 0.0)
    assert set(host.signals) == {signal.SIGQUIT} and len(host.requests) > 1
    assert lines and all("failed: no result for 0 s" in line for line in lines)
    assert len({line.split("failed")[0] for line in lines}) == len(lines), "a cell was tried twice"


def test_a_number_of_devices_without_a_measurement_is_named(tmp_path: Path) -> None:
    space, host = make_space(Experiment(), 4, 0.5), cast("Any", BrokenHost())
    with pytest.raises(RunFailed, match=r"no batch size could be measured on 4 devices: see "):
        probe_map.measure(space, DESCRIBED, "", tmp_path, host, print, 60.0)


def test_a_map_belongs_to_its_processor_and_its_share_of_the_cores(tmp_path: Path) -> None:
    maps = list[Path]()
    for described in (
        DESCRIBED,
        dataclasses.replace(DESCRIBED, cores=2),
        dataclasses.replace(DESCRIBED, processor="EPYC 9654"),
        dataclasses.replace(DESCRIBED, cores=2),
    ):
        host = HangingHost()
        # A known map has no cell left, so each is measured below a folder of its own.
        with pytest.raises(RunFailed):
            folder = tmp_path / str(len(maps))
            probe_map.measure(SPACE, described, "", folder, cast("Any", host), lambda _: None, 0.0)
        maps.append(host.requests[0].results.relative_to(folder))
    assert len(set(maps)) == 3 and maps[1] == maps[3]

"""Measuring the probe map, without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rankzero.errors import RunFailed
from rankzero.experiment import Experiment
from rankzero.tuning.probe import probe_map
from rankzero.tuning.space import make_space
from rankzero.tuning.trials.describe import ExperimentDescription


class BrokenHost:
    """Its processes end without a result."""

    def run(self, *_: Any) -> None:
        pass

    def has_ended(self, _: float) -> bool:
        return True


def test_a_number_of_devices_without_a_measurement_is_named(tmp_path: Path) -> None:
    described = ExperimentDescription(
        *("Mine", (), {}, 0.5, 1, 1000, True, ("fp32",), "cpu", ""),
    )
    space = make_space(Experiment(), 4, 0.5)
    host = cast("Any", BrokenHost())
    with pytest.raises(RunFailed, match=r"no batch size could be measured on 4 devices: see "):
        probe_map.measure(space, described, "", tmp_path, host, print)

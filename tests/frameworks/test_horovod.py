"""`rankzero.track` with Horovod itself, two processes by `horovodrun`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from frameworks.examples import EXAMPLES, SECONDS, best, checkpoints, end, start, steps_of, tracked

pytestmark = pytest.mark.timeout(2 * SECONDS)


def test_two_processes_of_horovodrun_are_one_run(tmp_path: Path) -> None:
    if find_spec("horovod") is None:
        pytest.skip("Horovod is not built: make test-with-horovod")
    launcher = "horovodrun", "--gloo", "-np", "2", sys.executable
    code, output = end(start(tmp_path, *launcher, str(EXAMPLES / "horovod_digits.py"), "2"))
    assert code == 0, output
    found = tracked(tmp_path)
    assert found.status == "FINISHED" and best(found) > 0.8
    assert steps_of(tmp_path, found, "train/loss") == list(range(1, 45))
    assert steps_of(tmp_path, found, "val/accuracy") == [22, 44]
    assert found.params["processes"] == "2"
    assert checkpoints(tmp_path)

"""`rankzero.track` in a logger of Composer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from frameworks.examples import (
    EXAMPLES,
    SECONDS,
    best,
    end,
    free_ports,
    run,
    start,
    steps_of,
    tracked,
)

pytestmark = pytest.mark.timeout(2 * SECONDS)

BROKEN = f"""
import sys
sys.path[:0] = [{str(EXAMPLES)!r}]
import composer_digits as example
import torch

class Broken(torch.nn.Module):
    calls = 0

    def forward(self, values):
        self.calls += 1
        if self.calls == 20:
            raise ValueError("broken on purpose")
        return values

real = example.convnet
example.convnet = lambda width: torch.nn.Sequential(real(width), Broken())
example.main(3)
"""


@pytest.fixture(autouse=True)
def installed() -> None:
    if find_spec("composer") is None:
        pytest.skip("Composer is not installed: make test-with-composer")


def test_two_processes_of_composer_are_one_run(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    launcher = "composer", "-n", "2", "--master_port", str(port)
    code, output = end(start(tmp_path, *launcher, str(EXAMPLES / "composer_digits.py"), "2"))
    assert code == 0, output
    found = tracked(tmp_path)
    assert found.status == "FINISHED" and best(found) > 0.8
    assert steps_of(tmp_path, found, "train/loss") == list(range(1, 45))
    assert steps_of(tmp_path, found, "val/MulticlassAccuracy") == [22, 44]
    assert found.params["batch_size"] == "64" and "composer_version" in found.params


def test_exception_in_the_training_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BROKEN)
    code, output = run("script.py", tmp_path)
    assert code != 0 and "broken on purpose" in output
    found = tracked(tmp_path)
    assert found.status == "FAILED"
    assert "ValueError: broken on purpose" in found.tags["rankzero.reason"]
    assert steps_of(tmp_path, found, "train/loss") == list(range(1, 20))

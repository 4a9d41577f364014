"""`rankzero.track` in the workers of Ray Train."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from frameworks.examples import (
    EXAMPLES,
    SECONDS,
    best,
    checkpoints,
    needs,
    run,
    steps_of,
    tracked,
)
from rankzero.events import RunEnded, RunStarted, StepsLogged
from support.runs import of_kind
from support.stores import list_runs

pytestmark = pytest.mark.timeout(2 * SECONDS)

# A local cluster of the test's own.
RAY = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}

KILLED_ONCE = f"""
import os, signal, sys
from pathlib import Path
paths = [{str(EXAMPLES)!r}, {str(EXAMPLES.parent)!r}]
sys.path[:0] = paths
import ray_digits

def loop(config):
    sys.path[:0] = paths
    import ray_digits as example
    from ray import train
    real, calls = example.cross_entropy, []
    mark = Path(config["folder"]).with_name("killed")

    def cross_entropy(*arguments):
        calls.append(1)
        if len(calls) == 30 and train.get_context().get_world_rank() == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    example.cross_entropy = cross_entropy
    example.train_loop_per_worker(config)

ray_digits.train_loop_per_worker = loop
ray_digits.main(2, "r1")
"""


@pytest.fixture(autouse=True)
def installed() -> None:
    needs("ray")


def test_two_workers_are_one_run_that_outlives_them(tmp_path: Path) -> None:
    code, output = run(str(EXAMPLES / "ray_digits.py"), tmp_path, "2", "r1", **RAY)
    assert code == 0, output
    # Ray kills the recorder with its worker. The courier delivers the rest.
    until = time.monotonic() + 60
    store = f"sqlite:///{tmp_path / 'mlruns' / 'mlflow.db'}"
    while [found.status for found in list_runs(store)] != ["FINISHED"]:
        assert time.monotonic() < until
        time.sleep(0.2)
    found = tracked(tmp_path)
    assert found.name == "r1" and best(found) > 0.8
    assert found.params["lr"] == "0.003" and found.params["epochs"] == "2"
    assert steps_of(tmp_path, found, "train/loss") == list(range(1, 45))
    assert steps_of(tmp_path, found, "val/accuracy") == [22, 44]
    assert [path.name for path in checkpoints(tmp_path)] == ["step_00000044"]


def test_run_continues_when_ray_restarts_a_killed_worker(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KILLED_ONCE)
    code, output = run("script.py", tmp_path, **RAY)
    assert code == 0, output
    found = tracked(tmp_path)
    assert found.status == "FINISHED" and best(found) > 0.8
    assert steps_of(tmp_path, found, "train/loss") == list(range(1, 45))
    folder = tmp_path / "mlruns/runs/r1"
    assert len(of_kind(folder, RunStarted)) == 2
    assert [event.status for event in of_kind(folder, RunEnded)] == ["FAILED", "FINISHED"]
    rows = [step for event in of_kind(folder, StepsLogged) for step in event.steps]
    assert rows[-22:] == list(range(23, 45))

"""The adapters against the real frameworks: the examples that users start from, and how their runs end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankzero.tracking.catalog import folders
from rankzero.tracking.mlflow import RunRecord, Tracker
from rankzero.tracking.sync import deliver

EXAMPLES = Path(__file__).parents[2] / "experiments" / "integrations"
FRAMEWORKS = {"lightning": "lightning", "transformers": "transformers", "accelerate": "accelerate", "ignite": "ignite"}


def needs(framework: str) -> None:
    pytest.importorskip(FRAMEWORKS[framework], reason=f"an extra: pip install rankzero[{framework}]")


def run(script: str, folder: Path, *words: str, **environ: str) -> tuple[int, str]:
    """Run a script as a user would, in a folder of its own."""
    done = subprocess.run(
        [sys.executable, script, *words], cwd=folder, check=False, text=True, capture_output=True, timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environ},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def tracked(folder: Path) -> RunRecord:
    """Return the only run, once everything is in MLflow."""
    (only,) = folders(folder / "mlruns" / "runs")
    assert deliver(only).done
    (found,) = Tracker(f"sqlite:///{folder / 'mlruns' / 'mlflow.db'}").list_runs()
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_example_is_tracked_to_its_end(framework: str, tmp_path: Path) -> None:
    needs(framework)
    code, output = run(str(EXAMPLES / f"{framework}_digits.py"), tmp_path, "3")
    assert code == 0, output
    found = tracked(tmp_path)
    assert found.status == "FINISHED" and (found.best or 0.0) > 0.8
    losses = Tracker(f"sqlite:///{tmp_path / 'mlruns' / 'mlflow.db'}").history(found.run_id, "train/loss")
    assert len(losses) == 3 * 22, "a point for every step"
    assert any("lr" in name or "learning_rate" in name for name in found.params), found.params
    checkpoints = list((tmp_path / "mlruns/runs").glob("*/checkpoints/step_*"))
    assert checkpoints or framework in ("transformers", "ignite")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_exception_in_the_training_is_a_failed_run(framework: str, tmp_path: Path) -> None:
    needs(framework)
    script = tmp_path / "broken.py"
    script.write_text(f"""
import sys
sys.path[:0] = [{str(EXAMPLES)!r}, {str(EXAMPLES.parent)!r}]
import torch
import {framework}_digits as example
calls = []
def broken(*_, **__):
    calls.append(1)
    if len(calls) > 30:
        raise ValueError("broken on purpose")
    return real(*_, **__)
real, example.cross_entropy = example.cross_entropy, broken
if __name__ == "__main__":
    example.main(3)
""")
    code, output = run(str(script), tmp_path)
    assert code != 0 and "broken on purpose" in output
    found = tracked(tmp_path)
    assert found.status == "FAILED" and "ValueError: broken on purpose" in found.tags["rankzero.reason"]


def test_two_ranks_under_accelerates_launcher_are_one_run(tmp_path: Path) -> None:
    needs("accelerate")
    code, output = run("-m", tmp_path, "accelerate.commands.launch", "--cpu", "--num_processes", "2",
                       "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
                       str(EXAMPLES / "accelerate_digits.py"), "2")  # fmt: skip
    assert code == 0, output
    assert tracked(tmp_path).status == "FINISHED"

"""Run the example files, and read what they left in MLflow."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rankzero.catalog.lookup import folders
from rankzero.mlflow_store.client import MlflowRuns, RunRecord
from rankzero.run_store.journal import read_all
from rankzero.tracking.sync import deliver
from support.paths import EXPERIMENTS
from support.stores import list_runs

EXAMPLES = EXPERIMENTS / "integrations"
SECONDS = 240


def needs(framework: str, extra: str | None = None) -> None:
    """Skip if a framework is not installed."""
    # An import would take seconds, and each framework warns of something.
    if find_spec(framework) is None:
        pytest.skip(f"an extra: pip install rankzero[{extra or framework}]")


def start(folder: Path, *command: str, **environ: str) -> subprocess.Popen[str]:
    """Start a command as a user would, in its own folder, with the environment's programs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PATH": path,
    }
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **quiet, **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return how a process ended, and all that it printed."""
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, output


def run(script: str, folder: Path, *words: str, **environ: str) -> tuple[int, str]:
    """Run a script to its end."""
    return end(start(folder, sys.executable, script, *words, **environ))


def scripted(framework: str, folder: Path, text: str) -> tuple[list[Any], str]:
    """Run a script that tracks the run r1. Return its events, and what it printed."""
    needs(framework)
    (folder / "script.py").write_text(text)
    code, output = run("script.py", folder)
    assert code == 0, output
    return list(read_all(folder / "mlruns/runs/r1/events.jsonl")), output


def tracker(folder: Path) -> MlflowRuns:
    return MlflowRuns(f"sqlite:///{folder / 'mlruns' / 'mlflow.db'}")


def all_tracked(folder: Path) -> list[RunRecord]:
    """Return the runs, once everything is in MLflow."""
    assert all(
        deliver(found, patience=SECONDS).done for found in folders(folder / "mlruns" / "runs")
    )
    return list_runs(f"sqlite:///{folder / 'mlruns' / 'mlflow.db'}")


def tracked(folder: Path) -> RunRecord:
    """Return the only run, on the disk and in MLflow."""
    (_,) = folders(folder / "mlruns" / "runs")
    (found,) = all_tracked(folder)
    return found


def best(found: RunRecord) -> float:
    """Return the best value of the run's goal."""
    return float(found.tags.get("rankzero.best", 0.0))


def steps_of(folder: Path, found: RunRecord, metric: str) -> list[int]:
    """Return the steps at which a run logged a metric."""
    return [point.step for point in tracker(folder).history(found.run_id, metric)]


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "mlruns" / "runs").glob("*/checkpoints/step_*"))


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports

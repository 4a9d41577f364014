"""User code's own calls of mlflow in a tracked run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rankzero
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status

SCRIPT = """
import os, threading, mlflow, rankzero
os.environ["MLFLOW_EXPERIMENT_ID"] = "7"
mlflow.set_tracking_uri("sqlite:///elsewhere.db")
del os.environ["MLFLOW_TRACKING_URI"]
with rankzero.track("mine", {"lr": 0.1}, name="finished") as run:
    assert run.id is not None and run.mlflow() == run.id
    mlflow.log_metric("theirs", 0.5, step=3)
    mlflow.log_param("late", 1)
    mlflow.log_text("hello", "notes.txt")
    mlflow.end_run()
    assert run.mlflow() == mlflow.active_run().info.run_id
    def other():
        run.mlflow()
        mlflow.log_metric("from a thread", 2.0)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    run.log({"ours": 1.0}, step=3)
assert mlflow.active_run() is None
assert "MLFLOW_TRACKING_URI" not in os.environ, "a later run goes to its own folder"
assert os.environ.pop("MLFLOW_EXPERIMENT_ID") == "7", "a program with another store has its own"
outer = rankzero.track("mine", name="outer")
outer.mlflow()
assert "MLFLOW_EXPERIMENT_ID" not in os.environ
inner = outer.child("inner")
inner.mlflow()
mlflow.log_metric("deep", 1.0)
inner.finish()
assert mlflow.active_run().info.run_id == outer.id
mlflow.log_metric("theirs", 1.0)
raise ValueError("at the end")
"""


def test_calls_of_mlflow_reach_the_run_whose_end_counts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 1 and "ValueError: at the end" in done.stderr, done.stderr
    runs = Path("mlruns/runs").absolute()
    for name in ("finished", "outer", "outer-inner"):
        assert delivery_status.wait(RunFolder(runs / name)).done
    store = MlflowRuns(RunFolder(runs / "outer").identity.tracking_uri)
    found = {name: store.find_run(name) for name in ("finished", "outer", "outer-inner")}
    assert {name: run.status for name, run in found.items()} == {
        "finished": "FINISHED",
        "outer": "FAILED",
        "outer-inner": "FINISHED",
    }
    metrics = found["finished"].metrics
    assert (metrics["theirs"], metrics["ours"], metrics["from a thread"]) == (0.5, 1.0, 2.0)
    params = found["finished"].params
    assert (params["lr"], params["late"]) == ("0.1", "1")
    text = store.download_artifact(found["finished"].run_id, "notes.txt", Path())
    assert text.read_text() == "hello"
    assert found["outer-inner"].metrics["deep"] == found["outer"].metrics["theirs"] == 1.0


def test_run_that_mlflow_lacks_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with rankzero.track("mine", offline=True) as run:
        assert run.mlflow() is None and run.mlflow() is None
    printed = capsys.readouterr().out
    assert printed.count(f"mlflow's own calls do not reach {run.name}") == 1

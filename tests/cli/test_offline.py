"""Offline runs: recorded completely, delivered by `rankzero sync`, and mlflow is never imported."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

import rankzero as package
from rankzero.catalog.lookup import mlflow_id
from rankzero.events import RunEnded, RunStarted
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store import run_locks
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync
from rankzero.tracking.delivery_status import wait_for_recorder
from support.commands import TINY, Command, events, losses, tracked

REFUSES = """
import pathlib, sys
pathlib.Path({mark!r}).write_text(" ".join(sys.argv))
raise ImportError("mlflow is not available")
"""


@pytest.fixture
def offline(rankzero: Command, tmp_path: Path) -> Command:
    """A command in a folder without a store, whose processes leave a mark if they import mlflow."""
    (rankzero.folder / "mlruns" / "mlflow.db").unlink()
    (tmp_path / "path" / "mlflow").mkdir(parents=True)
    (tmp_path / "path" / "mlflow" / "__init__.py").write_text(
        REFUSES.format(mark=str(tmp_path / "imported"))
    )
    rankzero.environ |= {
        "RANKZERO_OFFLINE": "1",
        "PYTHONPATH": f"{tmp_path / 'path'}:{os.environ.get('PYTHONPATH', '')}",
    }
    return rankzero


def go_online(command: Command, store: Path) -> None:
    shutil.copy(store, command.folder / "mlruns" / "mlflow.db")  # making one takes seconds
    del command.environ["RANKZERO_OFFLINE"]
    command.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")


@pytest.mark.slow
def test_offline_run_is_recorded_resumed_and_delivered_by_sync(
    offline: Command, tmp_path: Path, new_store: Path
) -> None:
    words = (
        "--nproc",
        2,
        "train.checkpoints.save_every=5",
        "train.log_every=2",
        "train.mlflow.log_model=true",
    )
    process = offline.start(
        "train", TINY, "--run-name", "away", "train.steps=40", "step_seconds=0.05", *words
    )
    folder = offline.wait_for_step(7)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "offline: the run is in mlruns/runs/away; deliver it with: rankzero sync away" in output

    code, output = offline("resume", "away", "step_seconds=0")
    assert code == 0 and output.count("rankzero sync away") == 1, output
    assert [type(event) for event in events(folder)].count(RunStarted) == 2
    assert list(losses(folder)) == list(range(1, 41))
    assert "SystemSampled" in folder.system(0).read_text()
    assert (folder.artifacts / "provenance" / "packages.txt").exists()
    for shown, words in {
        "away": ("runs",),
        "FINISHED": ("report", "away"),
        "not everything is in MLflow: rankzero sync away": ("doctor", "away"),
    }.items():
        code, output = offline(*words)
        assert code == 0 and shown in output, output
    offline.succeed("logs", "away")
    assert not (tmp_path / "imported").exists()
    assert not list((offline.folder / "mlruns").glob("*.db*")) and mlflow_id(folder) is None
    assert offline("resume", "elsewhere")[0] == 2

    go_online(offline, new_store)
    # A command of the warm server forks the logging process, also with the database open.
    code, output = offline("sync", "away", cold=True)
    assert code == 0 and "away: complete" in output, output
    run = tracked(folder)
    assert run.status == "FINISHED" and run.tags["rankzero.attempt"] == "2"
    store = MlflowRuns(folder.identity.tracking_uri)
    assert {point.step: point.value for point in store.history(run.run_id, "train/loss")} == losses(
        folder
    )
    assert not folder.late_model.exists(), "the best model is in MLflow"


def test_offline_run_whose_rank_0_is_killed_has_failed(offline: Command, tmp_path: Path) -> None:
    process = offline.start(
        "train", TINY, "--nproc", 2, "step_seconds=0.02", "train.epochs=100", "train.log_every=1"
    )
    folder = offline.wait_for_step(20)
    claim = run_locks.latest(folder, 0)
    assert claim is not None
    os.kill(claim.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1 and "SIGKILL" in output, output
    ended = events(folder)[-1]
    assert isinstance(ended, RunEnded) and ended.status == "FAILED"
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("search", TINY, "--nproc", 1, "--no-probe", "--trials", 1, "train.epochs=1"),
        ("compare", TINY, "--strategies", "single", "--nproc", 1, "train.steps=12"),
        ("profile", TINY, "--nproc", 1),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.slow
def test_search_compare_and_profile_deliver_nothing_offline(
    rankzero: Command, words: tuple[object, ...]
) -> None:
    store = rankzero.folder / "mlruns" / "mlflow.db"
    shutil.rmtree(store.parent)  # the first command in a new folder
    code, output = rankzero(*words, "--offline")
    assert code == 0 and "offline: the run is in mlruns/runs/" in output, output
    assert "not everything is in MLflow" not in output and not store.exists()
    # A search's trials and the runs of a comparison are offline as their parent is.
    assert rankzero.runs and {mlflow_id(folder) for folder in rankzero.runs} == {None}


@pytest.mark.slow
def test_flag_overrides_the_environment(offline: Command, new_store: Path) -> None:
    go_online(offline, new_store)
    offline.environ["RANKZERO_OFFLINE"] = "1"
    code, output = offline("train", TINY, "--no-offline", "train.steps=2")
    assert code == 0 and "offline" not in output, output
    assert tracked(offline.runs[0]).status == "FINISHED"


def test_tracked_loop_offline_is_delivered_by_sync(
    tmp_path: Path, new_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("RANKZERO_OFFLINE", "1")
    with package.track("own", {"lr": 0.1}, name="loop", folder=tmp_path) as run:
        for step in range(5):
            run.log({"loss": 1.0 / (1 + step)}, step)
        folder = RunFolder(tmp_path / "runs" / "loop")
        while not run_locks.has_live_recorder(folder):  # it starts while the loop runs
            time.sleep(0.05)
    wait_for_recorder(folder)
    assert not run_locks.has_live_recorder(folder) and not list(tmp_path.glob("*.db*"))
    shutil.copy(new_store, tmp_path / "mlflow.db")
    assert sync.deliver(folder).done
    history = MlflowRuns(folder.identity.tracking_uri).history(mlflow_id(folder) or "", "loss")
    assert [point.step for point in history] == list(range(5))

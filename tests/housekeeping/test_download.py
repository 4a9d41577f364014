"""A run's newest intact checkpoint comes back from MLflow, and replaces nothing better."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from rankzero.catalog.lookup import find
from rankzero.events import CheckpointSaved
from rankzero.experiment import Goal
from rankzero.housekeeping import download
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.client.models import MlflowModels
from rankzero.mlflow_store.uris import TrackingError
from rankzero.run_store import checkpoint_files
from rankzero.run_store.folder import RunFolder
from rankzero.training.checkpoints import restore
from rankzero.training.checkpoints.writer import Checkpoints
from support.checkpoints import damage_checkpoint
from support.runs import T0, make_folder


@pytest.fixture
def uploaded(sqlite: str, tmp_path: Path) -> RunFolder:
    """A run whose four checkpoints are in MLflow, and nowhere else."""
    folder = make_folder(tmp_path, sqlite, artifact_root=str(tmp_path / "artifacts"))
    tracker = MlflowRuns(sqlite)
    run = tracker.open_run(folder.identity, T0)
    writer = Checkpoints(folder.path, 9, Goal("val/loss"))
    events = [
        event
        for step in (-1, 1, 2, 3)
        for event in writer.save({"at": torch.tensor(step)}, step, {"val/loss": 1.0}, False)
    ]
    for event in [*events, *writer.close()]:
        assert isinstance(event, CheckpointSaved)
        tracker.models.save_checkpoint(run, event, folder.path / event.path, lambda _: [])
    for path in folder.checkpoints.iterdir():
        path.rename(folder.path / f"was-{path.name}")
    folder.write_identity(dataclasses.replace(folder.identity, mlflow_run_id=run.run_id))
    return folder


def _in_mlflow(folder: RunFolder, step: int) -> Path:
    (found,) = [
        path
        for path in Path(folder.identity.artifact_root or "").rglob("state.pt")
        if checkpoint_files.read_manifest(path.parent).step == step
    ]
    return found


def _fetched(folder: RunFolder) -> tuple[list[int], list[str]]:
    _, problems = download.newest_checkpoint(folder)
    return [
        int(restore.load(path)["at"]) for path in sorted(folder.checkpoints.iterdir())
    ], problems


def test_the_newest_is_fetched(uploaded: RunFolder) -> None:
    assert _fetched(uploaded) == ([3], [])


def test_the_best_is_fetched_with_the_newest(uploaded: RunFolder, sqlite: str) -> None:
    tracker, client = MlflowRuns(sqlite), MlflowClient(sqlite)
    known = tracker.models.list_checkpoints(tracker.find_run(uploaded.identity.mlflow_run_id or ""))
    for one in known:
        tag = {"rankzero.best": str(one.step == 1).lower()}
        client.set_logged_model_tags(one.model_id, tag)
    assert _fetched(uploaded) == ([1, 3], [])
    damage_checkpoint(uploaded.checkpoints / "step_00000001", "truncate")
    assert _fetched(uploaded) == ([1, 3], [])
    path, _ = checkpoint_files.newest_intact(uploaded.checkpoints)
    assert path is not None and path.name == "step_00000003"
    state = _in_mlflow(uploaded, 1)
    state.unlink()
    state.write_bytes(b"torn")
    for path in uploaded.checkpoints.iterdir():
        path.rename(uploaded.path / f"again-{path.name}")
    steps, (problem,) = _fetched(uploaded)
    assert steps == [3] and "the checkpoint of step 1 that MLflow has is not used" in problem


def test_a_best_checkpoint_that_cannot_come_does_not_hold_up_the_newest(
    uploaded: RunFolder, sqlite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, client = MlflowRuns(sqlite), MlflowClient(sqlite)
    known = tracker.models.list_checkpoints(tracker.find_run(uploaded.identity.mlflow_run_id or ""))
    for one in known[1:3]:  # as a courier that was killed between two tags leaves them
        client.set_logged_model_tags(one.model_id, {"rankzero.best": "true"})
    real = MlflowModels.download_checkpoint

    def download(models: MlflowModels, model_id: str, destination: Path) -> Path:
        if model_id == known[2].model_id:
            destination.mkdir()
            (destination / "part").write_bytes(b"1")
            raise ConnectionError("reset by peer")
        return real(models, model_id, destination)

    monkeypatch.setattr(MlflowModels, "download_checkpoint", download)
    steps, (problem,) = _fetched(uploaded)
    assert steps == [3] and "of step 2" in problem and "reset by peer" in problem
    assert [one.name for one in uploaded.checkpoints.iterdir()] == ["step_00000003"]


def test_run_that_was_renamed_in_mlflow_is_the_one_on_this_disk(
    uploaded: RunFolder, sqlite: str
) -> None:
    run_id = uploaded.identity.mlflow_run_id or ""
    MlflowClient(sqlite).update_run(run_id, name="the good one")
    uploaded.config.write_text("lr: 0.1")
    runs = uploaded.path.parent
    assert download.run_folder(runs, sqlite, "the good one") == uploaded
    assert [path.name for path in runs.iterdir()] == [uploaded.path.name]


def test_settings_that_do_not_come_leave_no_folder(
    uploaded: RunFolder, sqlite: str, tmp_path: Path
) -> None:
    runs, run_id = tmp_path / "elsewhere" / "runs", uploaded.identity.mlflow_run_id or ""
    with pytest.raises(TrackingError):
        download.run_folder(runs, sqlite, run_id)
    assert find(runs, run_id) is None
    uploaded.config.write_text("lr: 0.1")
    tracker = MlflowRuns(sqlite)
    tracker.log_artifact(tracker.find_run(run_id).run_id, uploaded.config)
    assert download.run_folder(runs, sqlite, run_id).config.read_text() == "lr: 0.1"


def test_broken_checkpoint_is_skipped_and_reported(uploaded: RunFolder) -> None:
    state = _in_mlflow(uploaded, 3)
    state.unlink()  # it may be the very file that was uploaded
    state.write_bytes(b"torn")
    steps, (problem,) = _fetched(uploaded)
    assert steps == [2]
    assert (
        "the checkpoint of step 3 that MLflow has is not used" in problem
        and "truncated or altered" in problem
    )


def test_what_is_here_stays_where_mlflow_has_nothing_better(uploaded: RunFolder) -> None:
    for step in (-1, 1, 2, 3):
        state = _in_mlflow(uploaded, step)
        state.unlink()
        state.write_bytes(b"torn")
    mine = uploaded.checkpoints / "step_00000003"
    mine.mkdir(parents=True)
    (mine / "manifest.json").write_text('{"format": 99}')
    path, problems = download.newest_checkpoint(uploaded)
    assert path is None and len(problems) == 4
    assert [path.name for path in uploaded.checkpoints.iterdir()] == [mine.name] and (
        mine / "manifest.json"
    ).exists()

"""A run's folder, made again from what MLflow has of it: its settings, its newest checkpoint. Executes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from rankzero.errors import UserError
from rankzero.tracking.catalog import mlflow_id
from rankzero.tracking.journal import Identity, RunFolder
from rankzero.tracking.store import artifact_root


def run_folder(runs: Path, tracking_uri: str, name_or_id: str) -> RunFolder:
    """Make the folder of a run that MLflow knows. Raises TrackingError, UserError."""
    from rankzero.tracking.mlflow import Tracker

    tracker = Tracker(tracking_uri)
    found = tracker.find_run(name_or_id)
    if "rankzero.uuid" not in found.tags:
        raise UserError(f"{name_or_id} was not made by rankzero: it cannot be resumed")
    identity = Identity(
        name=found.name,
        uuid=found.tags["rankzero.uuid"],
        experiment=tracker.experiment_name(found.experiment_id),
        tracking_uri=tracking_uri,
        artifact_root=artifact_root(tracking_uri),
        experiment_file=_here(found.tags.get("rankzero.experiment_file")),
        project_dir=str(Path.cwd()),
        mlflow_run_id=found.run_id,
    )
    folder = RunFolder.open_or_create(runs, identity)
    tracker.download_artifact(found.run_id, "config.yaml", folder.path)
    return folder


def newest_checkpoint(folder: RunFolder) -> None:
    """Download the newest whole checkpoint of the run, where MLflow has one. The caller verifies its checksums."""
    from rankzero.tracking.mlflow import OpenRun, Tracker

    tracker = Tracker(folder.identity.tracking_uri)
    run_id = mlflow_id(folder)
    if run_id is None:
        return
    run = OpenRun(run_id, tracker.find_run(run_id).experiment_id, {})
    ready = [one for one in tracker.list_checkpoints(run) if one.status == "READY"]
    for newest in ready[-1:]:
        target = folder.checkpoints / f"step_{newest.step:08d}"
        shutil.rmtree(target, ignore_errors=True)
        tracker.download_checkpoint(newest.model_id, target)


def _here(recorded: str | None) -> str | None:
    """Return the experiment's file in the current folder: it is recorded relative to the folder it was started in."""
    return None if recorded is None else str(Path.cwd() / recorded)

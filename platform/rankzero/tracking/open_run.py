"""Finding a run in MLflow, or making it: node 0 does, once its parent is there, and other nodes wait for it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rankzero.events import RunStarted
from rankzero.run_store.delivery_state import DeliveryState, load, path_of
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import read

if TYPE_CHECKING:
    from rankzero.mlflow_store.client import MlflowRuns, OpenRun


def connect(tracking_uri: str) -> MlflowRuns:
    """Return the tracking store. Costs seconds of processor time: it imports mlflow."""
    from rankzero.mlflow_store.client import MlflowRuns

    return MlflowRuns(tracking_uri)


def open_run(
    folder: RunFolder, node: int, connect: Callable[[str], MlflowRuns]
) -> tuple[MlflowRuns, OpenRun] | None:
    """Return the folder's run in MLflow, and its store; None while it is somebody else's turn to make something.

    Node 0 makes the run; other nodes look for it. A child waits for its parent.
    """
    identity = folder.identity
    if identity.parent is not None or identity.parent_uuid is not None:
        identity = dataclasses.replace(
            identity, parent_run_id=_parent_run_id(folder, identity, connect)
        )
        if identity.parent_run_id is None:
            return None
    tracker = connect(identity.tracking_uri)
    run = (
        tracker.open_run(identity, _began(folder)) if node == 0 else tracker.find_open_run(identity)
    )
    return None if run is None else (tracker, run)


def adopt(progress: DeliveryState, run: OpenRun, from_elsewhere: bool) -> None:
    """Begin with what MLflow has of the run already, sent by a process whose progress is not here."""
    progress.run_id, progress.experiment_id = run.run_id, run.experiment_id
    progress.marks, progress.floor = dict(run.marks), dict(run.marks)
    samples = [mark for key, mark in run.marks.items() if key.startswith("system/")]
    progress.sample_offset = max(samples, default=-1) + 1 if from_elsewhere else 0


def _parent_run_id(
    folder: RunFolder, identity: Identity, connect: Callable[[str], MlflowRuns]
) -> str | None:
    """Return the run that this one is shown below, once it is there."""
    if identity.parent_uuid is None:
        beside = RunFolder(folder.path.parent / (identity.parent or ""))
        return load(path_of(beside, 0)).run_id
    parent = dataclasses.replace(identity, uuid=identity.parent_uuid, mlflow_run_id=None)
    found = connect(identity.tracking_uri).find_open_run(parent)
    return None if found is None else found.run_id


def _began(folder: RunFolder) -> float:
    events, _ = read(folder.events, 0, 1)
    return next((event.time for event in events if isinstance(event, RunStarted)), time.time())

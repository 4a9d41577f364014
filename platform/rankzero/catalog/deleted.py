"""Which runs are deleted, from the disk alone: the embedded store, and marks in runs' folders.

MLflow's word counts where the embedded store has the run. A run that was deleted and is restored in
MLflow is back at once. For a run that the store lacks, as one on a server, the mark counts.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rankzero.run_store import delivery_state, names
from rankzero.run_store.attempt import is_written
from rankzero.run_store.folder import RunFolder

log = logging.getLogger(__name__)
# As `mlflow_store.uris` has it, a room above this one.
_STORE = "mlflow.db"


class _InMlflow(NamedTuple):
    name: str | None
    deleted: bool


class StoreRows(NamedTuple):
    """The embedded store's word about runs."""

    uri: str
    runs: Mapping[str, _InMlflow]
    """By the run's id."""
    experiments: Mapping[str, tuple[str, float]]
    """By the experiment's id: the folder of its artifacts, and when it was made."""

    def name_of(self, run_id: str | None) -> str | None:
        """Return the run's name, which a user may change, or None without one."""
        found = self.runs.get(run_id or "")
        return None if found is None else found.name or None


def read_store(runs: Path) -> StoreRows:
    """Return what the embedded store has; nothing if it cannot be read now."""
    # Importing mlflow would take seconds.
    database = (runs.parent / _STORE).absolute()
    nothing = StoreRows("", {}, {})
    if not database.exists():
        return nothing
    uri = f"file:{urllib.parse.quote(str(database))}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, timeout=1.0, uri=True)) as store:
            rows = store.execute("SELECT run_uuid, name, lifecycle_stage FROM runs")
            found = {run: _InMlflow(name, stage == "deleted") for run, name, stage in rows}
            rows = store.execute(
                "SELECT experiment_id, artifact_location, creation_time FROM experiments"
            )
            made = {str(one): (str(place), (time or 0) / 1000) for one, place, time in rows}
    except sqlite3.Error as error:
        log.debug("%s: %s", database, error)
        return nothing
    return StoreRows(f"sqlite:///{database}", found, made)


def is_deleted(path: str | Path, run_id: str | None, store: StoreRows) -> bool:
    """Return whether the run of a folder itself is deleted; its parent may be."""
    in_mlflow = store.runs.get(run_id or "")
    if in_mlflow is not None:
        return in_mlflow.deleted
    folder = RunFolder(Path(path))
    return folder.deleted.exists() or _was_collected(folder, run_id, store)


def is_hidden(folder: RunFolder) -> bool:
    """Return whether a run or its parent is deleted. A run that lives is never hidden."""
    if is_written(folder):
        return False
    store, one = read_store(folder.path.parent), folder
    with contextlib.suppress(names.InvalidRunFolder):
        while True:
            identity = one.identity
            state = delivery_state.load(delivery_state.path_of(one, 0))
            if is_deleted(one.path, state.run_id or identity.mlflow_run_id, store):
                return True
            if identity.parent is None:
                return False
            one = RunFolder(folder.path.parent / identity.parent)
    return False


def _was_collected(folder: RunFolder, run_id: str | None, store: StoreRows) -> bool:
    """Return whether `mlflow gc` removed the run from the embedded store, with its artifacts."""
    # A database that was lost or replaced lacks the run, too. It does not know the experiment from
    # the time of the delivery, or the artifacts are still there. Then the run stays.
    if run_id is None or not store.runs:
        return False
    state = delivery_state.load(delivery_state.path_of(folder, 0))
    place, made = store.experiments.get(state.experiment_id or "", ("", 0.0))
    if not (place.startswith("/") and made <= state.updated and state.queue.uploaded):
        return False
    with contextlib.suppress(names.InvalidRunFolder):
        gone = not Path(place, run_id, "artifacts").exists()
        return gone and folder.identity.tracking_uri == store.uri
    return False

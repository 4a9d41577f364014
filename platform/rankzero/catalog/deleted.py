"""Which runs are deleted, from the disk alone: the embedded store, and marks in runs' folders.

MLflow's word counts where the embedded store has the run. A run that was deleted and is restored in
MLflow is back at once. For a run that the store lacks, as one on a server, the mark counts.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import urllib.parse
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import NamedTuple, TypeVar

from rankzero.errors import UserError
from rankzero.run_store import delivery_state, names
from rankzero.run_store.attempt import is_written
from rankzero.run_store.folder import RunFolder

log = logging.getLogger(__name__)
Found = TypeVar("Found")
# As `mlflow_store.uris` has it, a room above this one.
_STORE = "mlflow.db"
# As MLflow's client waits.
_SECONDS = 20.0


class StoreRows(NamedTuple):
    """The embedded store's word about runs."""

    uri: str
    runs: Mapping[str | None, str | None]
    """The runs' names, which a user may change, by the runs' ids."""
    deleted: Set[str]
    """The ids of those that are deleted."""
    experiments: Mapping[str, tuple[str, float]]
    """By the experiment's id: the folder of its artifacts, and when it was made."""


_NO_ROWS = StoreRows("", {}, frozenset(), {})


def read_store(runs: Path, seconds: float = _SECONDS) -> StoreRows:
    """Return what the embedded store has; nothing if there is none, or if it is damaged.

    Raises UserError if it is locked for `seconds`.
    """
    database = _database(runs)

    def read(store: sqlite3.Connection) -> StoreRows:
        found = dict(store.execute("SELECT run_uuid, name FROM runs"))
        rows = store.execute("SELECT run_uuid FROM runs WHERE lifecycle_stage = 'deleted'")
        gone = {run for (run,) in rows}
        return StoreRows(f"sqlite:///{database}", found, gone, _experiments(store))

    return _read(database, read, seconds) or _NO_ROWS


def artifact_folders(runs: Path) -> list[str]:
    """Return where the embedded store has its experiments' artifacts. Every command asks."""
    with contextlib.suppress(UserError):
        return [place for place, _ in (_read(_database(runs), _experiments, 1.0) or {}).values()]
    return []


def _experiments(store: sqlite3.Connection) -> dict[str, tuple[str, float]]:
    rows = store.execute("SELECT experiment_id, artifact_location, creation_time FROM experiments")
    return {str(one): (str(place), (time or 0) / 1000) for one, place, time in rows}


def _database(runs: Path) -> Path:
    return (runs.parent / _STORE).absolute()


def _read(
    database: Path, read: Callable[[sqlite3.Connection], Found], seconds: float = _SECONDS
) -> Found | None:
    # Importing mlflow would take seconds.
    uri = f"file:{urllib.parse.quote(str(database))}?mode=ro"
    # The second way reads a database with a write-ahead log in a folder that one may not write.
    for options in ("", "&immutable=1") if database.exists() else ():
        try:
            with contextlib.closing(
                sqlite3.connect(uri + options, timeout=seconds, uri=True)
            ) as store:
                return read(store)
        except sqlite3.Error as error:
            if "locked" in str(error):
                raise UserError(f"another program has locked {database}: try again") from error
            log.debug("%s: %s", database, error)
    return None


def is_deleted(path: str | Path, run_id: str | None, store: StoreRows) -> bool:
    """Return whether the run of a folder itself is deleted; its parent may be."""
    if run_id in store.runs:
        return run_id in store.deleted
    folder = RunFolder(Path(path))
    return folder.deleted.exists() or _was_collected(folder, run_id, store)


def is_hidden(folder: RunFolder) -> bool:
    """Return whether a run or its parent is deleted. A run that lives is never hidden."""
    if is_written(folder):
        return False
    store, one = _NO_ROWS, folder
    # A training starts also if the store is locked. The marks in the folders hold all the same.
    with contextlib.suppress(UserError):
        store = read_store(folder.path.parent)
    with contextlib.suppress(UserError):
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

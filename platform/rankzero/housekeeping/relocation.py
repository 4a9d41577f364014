"""Make a store that was moved or copied a store of its own place. Decision 0044 has the reasons.

Nothing outside of the store is written. The database comes last, in one transaction: until then it
names the former place, so another call finishes what a killed one began.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shlex
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rankzero.catalog import deleted, lookup, moved
from rankzero.errors import UserError
from rankzero.housekeeping.deletion import alone
from rankzero.mlflow_store import server, uris
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.names import InvalidRunFolder
from rankzero.tracking import open_run

# The columns in which MLflow has paths. A version of MLflow may lack some of these tables.
_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("trace_tags", "value"),
)


class _Change(NamedTuple):
    """A path in MLflow's database."""

    table: str
    column: str
    place: Path
    """The former one of the store."""
    old: str
    new: str


class Relocation(NamedTuple):
    """The rewritten runs and paths."""

    places: list[Path]
    """The former places of the store."""
    runs: int
    paths: int
    """In MLflow's database."""


def relocate(root: Path) -> Relocation:
    """Have MLflow and the runs of the store in `root` find everything in `root`.

    Raises UserError if somebody uses the store, or if files are in the former place alone.
    """
    here = root.resolve() if ".." in root.parts else root.absolute()
    path = here / uris.DATABASE
    uris.require_plain(path)
    if not (path.exists() or lookup.folders(here / "runs")):
        raise UserError(f"there is no store in {here}: name its folder with --dir")
    # Runs that were only offline have no database yet.
    source = path if path.exists() else ":memory:"
    with (
        server.exclusive(here) as is_alone,
        contextlib.closing(sqlite3.connect(source, timeout=20, isolation_level=None)) as database,
    ):
        if not is_alone:
            raise UserError(f"`rankzero ui` serves {here}: end it first")
        # A run that begins now waits here for its place of artifacts.
        database.execute("BEGIN IMMEDIATE")
        folders = lookup.folders(here / "runs")
        for folder in folders:
            with alone(folder) as unused:
                if not unused:
                    raise UserError(f"{folder.path.name} runs, or its delivery does: end it first")
        places = sorted(moved.former_places(here) | set(_former_stores(folders)))
        changes = list(_changes(database, places, here))
        _require_files(changes, here)
        count = sum(_rewrite(folder, places, here) for folder in folders)
        for one in changes:
            # Names of MLflow's own tables.
            query = f"UPDATE {one.table} SET {one.column} = ? WHERE {one.column} = ?"  # noqa: S608
            database.execute(query, (one.new, one.old))
        database.execute("COMMIT")
    return Relocation(places, count, len(changes))


def _former_stores(folders: list[RunFolder]) -> Iterator[Path]:
    """Yield the former places of the store, from its runs.

    A run that was delivered to a database elsewhere, and to none here, is another store's.
    """
    known = deleted.read_store(folders[0].path.parent).runs if folders else {}
    for folder in folders:
        with contextlib.suppress(InvalidRunFolder):
            run_id, store = lookup.mlflow_id(folder), open_run.former_store(folder)
            if store is not None and (run_id is None or run_id in known):
                yield store


def _changes(database: sqlite3.Connection, places: list[Path], here: Path) -> Iterator[_Change]:
    # The lower of two places that contain a path comes first, and counts.
    roots = [*itertools.product(sorted(places, reverse=True), (Path.__str__, Path.as_uri))]
    for table, column in _COLUMNS:
        with contextlib.suppress(sqlite3.OperationalError):
            # Names of MLflow's own tables.
            rows = database.execute(f"SELECT DISTINCT {column} FROM {table}")  # noqa: S608
            for (old,) in rows.fetchall():
                for place, text in roots:
                    before, after = (text(root) + "/" for root in (place, here))
                    if str(old).startswith(before):
                        yield _Change(table, column, place, old, after + old[len(before) :])
                        break


def _require_files(changes: list[_Change], here: Path) -> None:
    """Raise UserError if a folder that MLflow knows is in a former place and not here."""
    left = [one for one in changes if moved.local(one.old).exists() > moved.local(one.new).exists()]
    if left:
        top = moved.local(left[0].old).relative_to(left[0].place).parts[0]
        command = shlex.join(["cp", "-Rn", f"{left[0].place / top}/.", str(here / top)])
        raise UserError(
            f"{len(left)} folders with artifacts are not in {here}, such as {left[0].old}: copy "
            f"them first, which replaces nothing here: {command}"
        )


def _rewrite(folder: RunFolder, places: list[Path], here: Path) -> bool:
    """Rewrite the paths in a run's run.json; return whether there were any."""
    try:
        identity = folder.identity
    except InvalidRunFolder:  # as one that was damaged before
        return False
    database = uris.sqlite_path(identity.tracking_uri)
    if database is None or database.parent not in places:
        return False
    uri, root = uris.default_tracking_uri(here), database.parent
    new = dataclasses.replace(
        identity,
        tracking_uri=uri,
        artifact_root=uris.artifact_root(uri),
        experiment_file=_in_project(identity.experiment_file, root, here),
        project_dir=_in_project(identity.project_dir, root, here),
    )
    folder.write_identity(new)
    return True


def _in_project(path: str | None, root: Path, here: Path) -> str | None:
    """Return where a file of the project is, if the project was moved with its store."""
    if path is None or not Path(path).is_relative_to(root.parent):
        return path
    new = here.parent / Path(path).relative_to(root.parent)
    # With a class, as in path.py:Class.
    is_there = new.exists() or Path(str(new).rpartition(":")[0] or new).exists()
    return str(new) if is_there else path

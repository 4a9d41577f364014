"""Where MLflow keeps things: the tracking URI, the embedded store, its server. Imports no mlflow, so it costs nothing.

The embedded store is a folder, ``mlruns`` unless told otherwise: ``mlflow.db``, ``artifacts/``, ``runs/<name>/``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rankzero.errors import UserError

DATABASE = "mlflow.db"
ARTIFACTS = "artifacts"
SETUP = ".setup-"

_READ_AS_A_URIS = re.compile(r"\?|%[0-9A-Fa-f]{2}")

# Write-ahead logging needs memory shared between processes, which file systems of other machines cannot give.
_NETWORK_FILE_SYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "afs",
    "9p",
    "fuse",
)


class TrackingError(UserError):
    """Something about the tracking store that a person must fix; the message says what to do."""


class RunGone(TrackingError):
    """Someone deleted the run in MLflow; it takes nothing any more."""


def default_tracking_uri(root: Path) -> str:
    """Return the URI of the embedded store in `root`."""
    return f"sqlite:///{root.absolute() / DATABASE}"


def resolve_tracking_uri(flag: str | None, environ: Mapping[str, str], root: Path) -> str:
    """Return the one absolute URI that every process of a job uses: the flag's, else the environment's, else ours.

    Raises TrackingError for MLflow's old store of files, which MLflow itself now refuses, and for a database in a
    folder whose name MLflow would take for another's.
    """
    given = flag or environ.get("MLFLOW_TRACKING_URI")
    if not given:
        _refuse_file_store(root)
        require_plain(root.absolute() / DATABASE)
        return default_tracking_uri(root)
    scheme = urllib.parse.urlsplit(given).scheme
    if scheme == "sqlite":
        return _absolute_sqlite(given)
    if scheme in ("", "file"):
        raise TrackingError(
            f"the tracking URI {given!r} is a folder, MLflow's old file store, which it no longer writes to: use a "
            f"database such as {default_tracking_uri(root)} or a server's http:// address"
            + _migration_hint(Path(urllib.parse.urlsplit(given).path), root)
        )
    return given.rstrip("/") if scheme in ("http", "https") else given


def prepare_store(tracking_uri: str) -> None:
    """Make the folder and the file of a local database; do nothing for any other store.

    Raises TrackingError when that is not possible.
    """
    path = sqlite_path(tracking_uri)
    if path is None:
        return
    require_plain(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _create_database(path)
    except (OSError, sqlite3.Error) as error:
        raise TrackingError(
            f"cannot write the tracking store {path}: {error}; choose another folder or set "
            "MLFLOW_TRACKING_URI to a server's address"
        ) from error


def make_tables(tracking_uri: str, make: Callable[[str], object]) -> None:
    """Have `make` set up a local database that is still empty; do nothing for any other store.

    It comes into being in one step: MLflow's own migrations, cut off by a kill or begun by two processes at once, leave
    half of their tables behind, and no later attempt gets past them.
    """
    path = sqlite_path(tracking_uri)
    if path is None:
        return
    with _alone(path.parent):
        if is_empty(path):
            for left in path.parent.glob(f"{SETUP}*"):
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=SETUP, dir=path.parent) as folder:
                new = Path(folder) / path.name
                make(f"sqlite:///{new}")
                _copy(new, path)


def sqlite_path(tracking_uri: str) -> Path | None:
    """Return the file of a sqlite URI; None for any other store."""
    prefix = "sqlite:///"
    return Path(tracking_uri.removeprefix(prefix)) if tracking_uri.startswith(prefix) else None


def require_plain(path: Path) -> None:
    """Raise TrackingError for a database whose path means another one in a URI, or that has a URI's options."""
    found = _READ_AS_A_URIS.search(str(path))
    if found:
        raise TrackingError(
            f"the database {str(path)!r} would be kept elsewhere: what opens it reads the {found[0]!r} in there as a "
            "part of a URI; move or rename the folder, name another with --dir or sqlite:////absolute/path/mlflow.db "
            "(spaces as they are, no options), or a server's http:// address"
        )


def artifact_root(tracking_uri: str) -> str | None:
    """Return the folder for the artifacts of a local database, beside it; None: the server decides.

    Left alone, MLflow would put them into the current directory of whichever process writes first.
    """
    path = sqlite_path(tracking_uri)
    return None if path is None else str(path.parent / ARTIFACTS)


def server_command(root: Path, port: int, host: str = "127.0.0.1") -> list[str]:
    """Return the command that serves the embedded store of `root`, artifacts included; by itself to this machine only.

    `server.command` adds who may get in where it is reached from elsewhere.
    """
    artifacts = str(root.absolute() / ARTIFACTS)
    return [
        *(sys.executable, "-P", "-m", "mlflow", "server"),
        *("--backend-store-uri", default_tracking_uri(root)),
        *("--default-artifact-root", artifacts, "--artifacts-destination", artifacts),
        *("--host", host, "--port", str(port), "--workers", "1"),
    ]


def server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for `server_command`: no usage telemetry, no processes for jobs that nobody submits."""
    return {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        **environ,
    }


def deep_link(base_url: str, experiment_id: str, run_id: str) -> str:
    """Return the address of a run's page, in the part of the UI that is about training."""
    return f"{base_url.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


def runs_link(base_url: str, experiment_id: str, query: str) -> str:
    """Return the address of an experiment's runs."""
    return f"{base_url.rstrip('/')}/#/experiments/{experiment_id}/runs?workflowType=machine_learning&{query}"


def _absolute_sqlite(uri: str) -> str:
    path = sqlite_path(uri)
    if path is None or not path.name or ":memory:" in uri:
        raise TrackingError(
            f"the tracking URI {uri!r} names no file: processes could not share it; "
            "use sqlite:////absolute/path/mlflow.db"
        )
    require_plain(path.absolute())
    return f"sqlite:///{path.absolute()}"


def _refuse_file_store(root: Path) -> None:
    if (root / DATABASE).exists() or not any(
        meta.parent.name.isdigit() for meta in root.glob("*/meta.yaml")
    ):
        return
    raise TrackingError(
        f"{root} holds runs of MLflow's old file store, which it no longer writes to"
        + _migration_hint(root, root)
    )


def _migration_hint(source: Path, root: Path) -> str:
    return (
        f". To keep its runs: mlflow migrate-filestore --source {source} --target {default_tracking_uri(root)}"
        ". To start afresh: move the folder away"
    )


def _create_database(path: Path) -> None:
    """Create the file with write-ahead logging; leave one that exists as it is.

    In sqlite's default mode whoever reads (the UI, a search) blocks the recorder's commits; with a write-ahead log
    readers and the writer do not wait for each other. The mode is a property of the file, so setting it once is enough.
    One process at a time: sqlite waits for nobody to set the mode, and fails where another has the file open.
    """
    new = not path.exists()
    with _alone(path.parent), contextlib.closing(sqlite3.connect(path, timeout=20)) as database:
        if new and not _on_network(path):
            database.execute("PRAGMA journal_mode=WAL")
        database.execute(
            "BEGIN IMMEDIATE"
        )  # fails here, and not after an hour of training, where it is read-only
        database.rollback()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block; a process that dies lets the next one in."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_empty(path: Path) -> bool:
    """Tell whether a database has no tables yet."""
    with contextlib.closing(sqlite3.connect(path, timeout=20)) as database:
        return database.execute("SELECT 1 FROM sqlite_master").fetchone() is None


def _copy(source: Path, target: Path) -> None:
    """Fill a database with another's content, in one transaction; its write-ahead log stays as it is."""
    with (
        contextlib.closing(sqlite3.connect(source)) as new,
        contextlib.closing(sqlite3.connect(target, timeout=20)) as database,
    ):
        new.backup(database)


def _on_network(path: Path) -> bool:
    """Tell whether the file lies on another machine, by the longest mount point above it."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    above = [fields for fields in mounts if path.absolute().is_relative_to(fields[1])]
    kind = max(above, key=lambda fields: len(fields[1]), default=["", "", ""])[2]
    return kind.startswith(_NETWORK_FILE_SYSTEMS)

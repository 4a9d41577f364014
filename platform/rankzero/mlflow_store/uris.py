"""The tracking store: its URI and the embedded database.

Imports no mlflow, so every command can import it. The embedded store is a folder, ``mlruns`` by
default, with ``mlflow.db``, ``artifacts/`` and ``runs/<name>/``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import sqlite3
import tempfile
import urllib.parse
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rankzero.errors import UserError
from rankzero.mlflow_store import drivers
from rankzero.run_store import lock_files
from rankzero.run_store.location import make_root

DATABASE = "mlflow.db"
_ARTIFACTS = "artifacts"
_SETUP = ".setup-"
_SETUP_SECONDS = 60.0
_READ_AS_URI = re.compile(r"\?|%[0-9A-Fa-f]{2}")
# Write-ahead logging needs memory that processes share. Network file systems do not have it.
_NETWORK_FILE_SYSTEMS = (
    "nfs cifs smb lustre gpfs beegfs ceph afs 9p fuse wekafs panfs dvs virtiofs vboxsf ocfs2 gfs2"
)
_MOUNTS = Path("/proc/self/mounts")
_HOST_AND_PORT = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):\d+(/.*)?")


class TrackingError(UserError):
    """A problem of the tracking store that a person must solve; the message says how."""


class NoSuchRun(TrackingError):
    """The store has no run of this name or id."""


class RunGone(TrackingError):
    """Somebody deleted the run in MLflow, so it accepts nothing any more."""


class RunErased(RunGone):
    """MLflow has no such run, because somebody erased it or because it has another database."""


class RunContinued(RunGone):
    """Another machine has begun a newer attempt of the run, so it accepts no older one's items."""


class StoreMoved(RunGone):
    """The run's store was moved or copied, so its database is another one now."""


class ExperimentGone(TrackingError):
    """Somebody deleted the MLflow experiment, so it takes no new run."""


def default_tracking_uri(root: Path) -> str:
    """Return the URI of the embedded store in `root`."""
    return f"sqlite:///{root.absolute() / DATABASE}"


def resolve_tracking_uri(flag: str | None, environ: Mapping[str, str], root: Path) -> str:
    """Return the absolute URI that all processes of a job use: flag, environment, or default.

    Raises TrackingError for MLflow's old file store, which MLflow itself refuses, for a
    database in a folder whose name MLflow would read as another's, and for what is no address.
    """
    given = flag or environ.get("MLFLOW_TRACKING_URI")
    if not given:
        is_file_store = any(meta.parent.name.isdigit() for meta in root.glob("*/meta.yaml"))
        if is_file_store and not (root / DATABASE).exists():
            raise TrackingError(
                f"{root} holds runs of MLflow's old file store, which MLflow no longer supports"
                + _migration_hint(root, root)
            )
        require_plain(root.absolute() / DATABASE)
        return default_tracking_uri(root)
    if given == "databricks":  # MLflow's name of the default profile
        return given
    scheme = urllib.parse.urlsplit(given).scheme
    if scheme == "sqlite":
        path = sqlite_path(given)
        if path is None or not path.name or ":memory:" in given:
            raise TrackingError(
                f"the tracking URI {given!r} names no file, so processes cannot share it: "
                "use sqlite:////absolute/path/mlflow.db"
            )
        require_plain(path.absolute())
        return f"sqlite:///{path.absolute()}"
    _require_address(given)
    if scheme in ("", "file"):
        raise TrackingError(
            f"the tracking URI {given!r} is a folder, MLflow's old file store, which MLflow no "
            f"longer supports: use a database such as {default_tracking_uri(root)} or a server's "
            "http:// address" + _migration_hint(Path(urllib.parse.urlsplit(given).path), root)
        )
    return given.rstrip("/") if scheme in ("http", "https") else given


def prepare_store(
    tracking_uri: str, *, patience_seconds: float = _SETUP_SECONDS, mounts: Path = _MOUNTS
) -> None:
    """Create the folder and the file of a local database; check the driver of another one.

    Waits at most `patience_seconds` for other processes that do the same. `mounts` lists the
    mounted file systems. Raises TrackingError if the database cannot be written, and UserError if
    the driver of another database is missing.
    """
    drivers.require_driver(tracking_uri)
    path = sqlite_path(tracking_uri)
    if path is None:
        return
    require_plain(path)
    try:
        make_root(path.parent)
        # One process at a time: SQLite fails to set the mode if another has the file open. A file
        # with content has its mode, and needs no lock.
        is_new = not path.exists() or path.stat().st_size == 0
        with (
            _alone(path, patience_seconds) if is_new else contextlib.nullcontext(False) as alone,
            contextlib.closing(sqlite3.connect(path, timeout=20)) as database,
        ):
            if alone and not _on_network(path, mounts):
                # In SQLite's default mode, readers such as MLflow's page block the courier's
                # commits. The mode is stored in the file.
                with contextlib.suppress(sqlite3.OperationalError):
                    database.execute("PRAGMA journal_mode=WAL")
            # A read-only database fails here, and not after an hour of training.
            database.execute("BEGIN IMMEDIATE")
            database.rollback()
    except (OSError, sqlite3.Error) as error:
        raise TrackingError(
            f"cannot write the tracking store {path}: {error}; choose another folder or set "
            "MLFLOW_TRACKING_URI to a server's address"
        ) from error


def make_tables(tracking_uri: str, make: Callable[[str], object]) -> None:
    """Call `make` with a URI to set up a local database that is empty. Ignores other stores."""
    path = sqlite_path(tracking_uri)
    if path is None or not is_empty(path):
        return
    from rankzero.mlflow_store import ready_tables  # few commands need it

    # The tables must appear in one step. MLflow's own migrations leave half of them if they are
    # killed or if two processes run them at once, and no later attempt can continue.
    with _alone(path, _SETUP_SECONDS) as alone:
        if not is_empty(path):
            return
        # The other process would lose its half-made tables.
        if not alone:
            raise TrackingError(
                f"another process has been setting up {path} for {_SETUP_SECONDS:.0f} s: stop "
                "it, or choose another folder with --dir"
            )
        # Another store of this folder may be set up now.
        own = f"{_SETUP}{zlib.crc32(os.fsencode(path.name)):08x}-"
        for left in path.parent.glob(f"{own}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=own, dir=path.parent) as folder:
            made = Path(folder) / path.name
            ready_tables.create(made, importlib.metadata.version("mlflow"))
            make(f"sqlite:///{made}")
            # One transaction, which keeps the write-ahead log of the target.
            with (
                contextlib.closing(sqlite3.connect(made)) as source,
                contextlib.closing(sqlite3.connect(path, timeout=20)) as target,
            ):
                source.backup(target)


def sqlite_path(tracking_uri: str) -> Path | None:
    """Return the file of an SQLite URI, or None for another store."""
    prefix = "sqlite:///"
    return Path(tracking_uri.removeprefix(prefix)) if tracking_uri.startswith(prefix) else None


def require_plain(path: Path) -> None:
    """Raise TrackingError if a URI with this path of a database means another path."""
    found = _READ_AS_URI.search(str(path))
    if found:
        raise TrackingError(
            f"the database {str(path)!r} would be created elsewhere: MLflow reads the {found[0]!r} "
            "in its path as a part of a URI; rename the folder, name another with --dir or "
            "sqlite:////absolute/path/mlflow.db (spaces as they are, no options), or use a "
            "server's http:// address"
        )


def artifact_root(tracking_uri: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the place for the artifacts of a database, or None if a server decides.

    None, too, if nobody has named the place for a database that is not local.
    """
    # By default, MLflow uses the current directory of the process that writes first.
    path = sqlite_path(tracking_uri)
    if path is None:
        named = environ.get(drivers.ARTIFACT_ROOT) if drivers.is_database(tracking_uri) else None
        return named or None
    return str(path.parent / _ARTIFACTS)


def is_empty(path: Path) -> bool:
    """Return whether a database has no tables yet."""
    with contextlib.closing(sqlite3.connect(path, timeout=20)) as database:
        return database.execute("SELECT 1 FROM sqlite_master").fetchone() is None


def _require_address(uri: str) -> None:
    """Raise TrackingError if MLflow has no store for the URI: a run could never be delivered."""
    mend = f"http://{uri}" if _HOST_AND_PORT.fullmatch(uri) else "http://host:port"
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme in ("http", "https"):
        is_known = bool(parts.hostname)
    elif parts.scheme in ("", "file"):  # folders have an error of their own
        is_known = not _HOST_AND_PORT.fullmatch(uri)
    else:
        plugins = importlib.metadata.entry_points(group="mlflow.tracking_store")
        is_known = drivers.is_database(uri) or parts.scheme in {"databricks"} | plugins.names
    if not is_known:
        raise TrackingError(f"the tracking URI {uri!r} is no address: write {mend}")


def _migration_hint(source: Path, root: Path) -> str:
    return (
        f". To keep its runs: mlflow migrate-filestore --source {source} "
        f"--target {default_tracking_uri(root)}. To start with an empty store: move the folder away"
    )


@contextlib.contextmanager
def _alone(database: Path, patience_seconds: float) -> Iterator[bool]:
    """Let one process at a time into the block. The lock ends with its process.

    Yield whether this process is alone: False after `patience_seconds` without the lock.
    """
    try:
        descriptor = lock_files.open_lock(database.with_name(f".{database.name}.lock"))
    except OSError:  # a read-only folder, where nothing is set up
        yield True
        return
    try:
        yield lock_files.try_lock(descriptor, seconds=patience_seconds)
    finally:
        os.close(descriptor)


def _on_network(path: Path, mounts: Path) -> bool:
    """Return whether the file is on another machine, by the longest mount point above it."""
    # Not psutil: it reads /etc/mtab, which in many containers is a file without the bind mounts.
    try:
        text = os.fsdecode(mounts.read_bytes())
    except OSError:
        return False
    lines = [line.split(" ") for line in text.split("\n") if line]
    kinds = {place.replace("\\040", " "): kind for _, place, kind, *_ in lines}
    above = [place for place in kinds if path.absolute().is_relative_to(place)]
    kind = kinds.get(max(above, key=len, default=""), "")
    return kind.startswith(tuple(_NETWORK_FILE_SYSTEMS.split()))

"""The tracking URI, and the embedded database."""

from __future__ import annotations

import argparse
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankzero.cli.commands import search
from rankzero.mlflow_store import uris
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.uris import TrackingError, resolve_tracking_uri
from rankzero.run_store import lock_files
from rankzero.tuning.options import default_storage
from support.runs import T0, make_folder, saved


def test_the_flag_wins_over_the_environment_and_the_default(tmp_path: Path) -> None:
    environ = {"MLFLOW_TRACKING_URI": "http://server:5000/"}
    assert resolve_tracking_uri("http://other", environ, tmp_path) == "http://other"
    assert resolve_tracking_uri(None, environ, tmp_path) == "http://server:5000"
    assert resolve_tracking_uri(None, {}, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_relative_database_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_tracking_uri("sqlite:///x/m.db", {}, tmp_path) == f"sqlite:///{tmp_path}/x/m.db"
    assert uris.default_tracking_uri(Path("mlruns")) == f"sqlite:///{tmp_path}/mlruns/mlflow.db"


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="names no file"):
        resolve_tracking_uri(uri, {}, tmp_path)


@pytest.mark.parametrize("uri", ["./mlruns", "file:///data/mlruns", "/data/mlruns"])
def test_the_error_for_a_folder_names_the_migration(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="mlflow migrate-filestore --source"):
        resolve_tracking_uri(uri, {}, tmp_path)


@pytest.mark.parametrize(
    ("uri", "mend"),
    [
        ("localhost:5000", "http://localhost:5000"),
        ("127.0.0.1:5000/", "http://127.0.0.1:5000/"),
        ("[::1]:5000", r"http://\[::1\]:5000"),
        ("http://", "http://host:port"),
        ("http:localhost:5000", "http://host:port"),
        ("ftp://x/y", "http://host:port"),
        (r"C:\mlruns", "http://host:port"),
    ],
)
def test_a_uri_without_a_store_in_mlflow_is_refused(uri: str, mend: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=f"is no address: write {mend}$"):
        resolve_tracking_uri(uri, {}, tmp_path)


@pytest.mark.parametrize(
    "uri", ["databricks", "databricks://profile", "postgresql+psycopg2://u@host/db"]
)
def test_what_mlflow_can_reach_passes(uri: str, tmp_path: Path) -> None:
    assert resolve_tracking_uri(uri, {}, tmp_path) == uri


def test_the_error_for_a_file_store_names_the_migration(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "meta.yaml").write_text("")
    with pytest.raises(TrackingError, match="mlflow migrate-filestore --source"):
        resolve_tracking_uri(None, {}, tmp_path)
    (tmp_path / "mlflow.db").touch()  # migrated: nothing to say any more
    resolve_tracking_uri(None, {}, tmp_path)


def test_only_a_new_database_gets_a_write_ahead_log(tmp_path: Path) -> None:
    uris.prepare_store(f"sqlite:///{tmp_path}/new/mlflow.db")
    assert _mode(tmp_path / "new" / "mlflow.db") == "wal"
    with sqlite3.connect(tmp_path / "old.db") as old:
        old.execute("create table t (x)")
    old.close()
    uris.prepare_store(f"sqlite:///{tmp_path}/old.db")
    assert _mode(tmp_path / "old.db") == "delete"


def test_a_database_on_a_network_disk_gets_no_write_ahead_log(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    for number, (kind, place) in enumerate(
        [
            ("nfs4", tmp_path),
            ("nfs4", tmp_path / "a\\040b"),
            ("ext4", tmp_path),
            ("wekafs", tmp_path),
            ("virtiofs", tmp_path),
        ]
    ):
        mounts.write_text(f"disk / ext4 rw 0 0\nserver:/home {place} {kind} rw 0 0\n")
        database = tmp_path / "a b" / f"{number}.db"
        uris.prepare_store(f"sqlite:///{database}", mounts=mounts)
        assert _mode(database) == ("wal" if kind == "ext4" else "delete")
    uris.prepare_store(f"sqlite:///{tmp_path}/no_list.db", mounts=tmp_path / "missing")


def test_a_store_is_prepared_although_another_process_keeps_its_lock(tmp_path: Path) -> None:
    lock = lock_files.open_lock(tmp_path / ".mlflow.db.lock")
    assert lock_files.try_lock(lock)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    uris.prepare_store(uri, patience_seconds=0.1)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("create table t (x)")
    database.close()
    # A database with content waits for nobody.
    began = time.monotonic()
    uris.prepare_store(uri)
    uris.make_tables(uri, lambda _: pytest.fail("it has tables"))
    assert time.monotonic() - began < 10
    os.close(lock)


def test_two_stores_of_a_folder_are_set_up_at_once(tmp_path: Path) -> None:
    first, second = tmp_path / "first.db", tmp_path / "second.db"

    def make(_: str) -> None:
        uris.make_tables(f"sqlite:///{second}", lambda _: None)

    uris.make_tables(f"sqlite:///{first}", make)
    assert not uris.is_empty(first) and not uris.is_empty(second)
    assert not list(tmp_path.glob(".setup-*"))


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match="choose another folder or set MLFLOW_TRACKING_URI"):
        uris.prepare_store(f"sqlite:///{tmp_path}/file/mlflow.db")


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database, and long enough to look at" * 10)
    with pytest.raises(TrackingError, match="not a database"):
        uris.prepare_store(f"sqlite:///{tmp_path}/mlflow.db")


@pytest.mark.parametrize("name", ["a%20b", "feature%2Fx", "what?", "a?timeout=3"])
def test_a_folder_that_mlflow_would_read_as_another_is_refused(name: str, tmp_path: Path) -> None:
    root = tmp_path / name / "mlruns"
    uri = f"sqlite:///{root}/mlflow.db"
    for refused in (
        lambda: resolve_tracking_uri(None, {}, root),
        lambda: resolve_tracking_uri(uri, {}, tmp_path),
        lambda: uris.prepare_store(uri),
        lambda: default_storage(root),
        lambda: search._search_options(search_in(root)),
    ):
        with pytest.raises(TrackingError, match="name another with --dir"):
            refused()
    with pytest.raises(TrackingError, match="no options"):
        resolve_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db?timeout=3", {}, tmp_path)
    assert resolve_tracking_uri("http://server?x=%20", {}, root) == "http://server?x=%20"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b", "größer", "a#b", "100%", "a+b&c=d;e:f@g", "it's [x] {}"])
def test_mlflow_keeps_everything_in_a_folder_of_any_other_name(name: str, tmp_path: Path) -> None:
    root = tmp_path / name
    uri = resolve_tracking_uri(None, {}, root)
    folder, tracker = make_folder(root, uri), MlflowRuns(uri)
    run = tracker.open_run(folder.identity, T0)
    tracker.log_artifact(run.run_id, folder.path / "run.json")
    event = saved(folder, 4)
    model_id = tracker.models.save_checkpoint(run, event, folder.path / event.path, lambda _: [])
    assert (tracker.models.download_checkpoint(model_id, tmp_path / "back") / "state.pt").exists()
    assert not uris.is_empty(root / uris.DATABASE)
    assert list(root.glob("artifacts/*/*/artifacts/run.json")) and list(
        root.glob("artifacts/*/models/*/artifacts/*")
    )
    assert {path.name for path in tmp_path.iterdir()} == {name, "back"}


def test_a_server_is_not_prepared() -> None:
    uris.prepare_store("http://nowhere:1")
    assert uris.artifact_root("http://nowhere:1") is None


def test_uris_recorder_and_sync_import_no_mlflow() -> None:
    code = (
        "import sys\n"
        "import rankzero.mlflow_store.uris, rankzero.tracking.recorder, rankzero.tracking.sync\n"
        "sys.exit(bool({'mlflow', 'torch', 'numpy', 'psutil'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def search_in(root: Path) -> argparse.Namespace:
    """Return the arguments of a search with a server's runs and a study below `root`."""
    names = (
        "minutes",
        "trials",
        "trial_minutes",
        "silence_seconds",
        "parallel",
        "price",
        "nproc",
        "like",
    )
    return argparse.Namespace(
        **dict.fromkeys(names),
        seeds=3,
        objective="time",
        tolerance=0.1,
        tracking_uri="http://server",
        storage=None,
        dir=root,
    )


def _mode(path: Path) -> str:
    database = sqlite3.connect(path)
    mode = str(database.execute("PRAGMA journal_mode").fetchone()[0])
    database.close()
    return mode

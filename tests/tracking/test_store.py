"""Where MLflow keeps things."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from rankzero.tracking import store
from rankzero.tracking.store import TrackingError, resolve_tracking_uri


def test_the_flag_beats_the_environment_beats_the_default(tmp_path: Path) -> None:
    environ = {"MLFLOW_TRACKING_URI": "http://server:5000/"}
    assert resolve_tracking_uri("http://other", environ, tmp_path) == "http://other"
    assert resolve_tracking_uri(None, environ, tmp_path) == "http://server:5000"
    assert resolve_tracking_uri(None, {}, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_relative_database_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_tracking_uri("sqlite:///x/m.db", {}, tmp_path) == f"sqlite:///{tmp_path}/x/m.db"
    assert store.default_tracking_uri(Path("mlruns")) == f"sqlite:///{tmp_path}/mlruns/mlflow.db"


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="names no file"):
        resolve_tracking_uri(uri, {}, tmp_path)


@pytest.mark.parametrize("uri", ["./mlruns", "file:///data/mlruns", "/data/mlruns"])
def test_a_folder_as_uri_is_refused_with_the_way_out(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="mlflow migrate-filestore --source"):
        resolve_tracking_uri(uri, {}, tmp_path)


def test_old_runs_in_the_root_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "meta.yaml").write_text("")
    with pytest.raises(TrackingError, match="mlflow migrate-filestore --source"):
        resolve_tracking_uri(None, {}, tmp_path)
    (tmp_path / "mlflow.db").touch()  # migrated: nothing to say any more
    resolve_tracking_uri(None, {}, tmp_path)


def test_a_new_database_has_a_write_ahead_log_and_an_old_one_is_left_alone(tmp_path: Path) -> None:
    store.prepare_store(f"sqlite:///{tmp_path}/new/mlflow.db")
    assert _mode(tmp_path / "new" / "mlflow.db") == "wal"
    with sqlite3.connect(tmp_path / "old.db") as old:
        old.execute("create table t (x)")
    old.close()
    store.prepare_store(f"sqlite:///{tmp_path}/old.db")
    assert _mode(tmp_path / "old.db") == "delete"


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match="choose another folder or set MLFLOW_TRACKING_URI"):
        store.prepare_store(f"sqlite:///{tmp_path}/file/mlflow.db")


def test_a_database_that_is_none_says_so(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database, and long enough to look at" * 10)
    with pytest.raises(TrackingError, match="not a database"):
        store.prepare_store(f"sqlite:///{tmp_path}/mlflow.db")


def test_servers_are_left_alone() -> None:
    store.prepare_store("http://nowhere:1")
    assert store.artifact_root("http://nowhere:1") is None


def test_resolving_and_recording_import_no_mlflow() -> None:
    code = (
        "import sys, rankzero.tracking.store, rankzero.tracking.recorder, rankzero.tracking.sync;"
        "sys.exit(bool({'mlflow', 'torch', 'numpy', 'psutil'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _mode(path: Path) -> str:
    database = sqlite3.connect(path)
    mode = str(database.execute("PRAGMA journal_mode").fetchone()[0])
    database.close()
    return mode

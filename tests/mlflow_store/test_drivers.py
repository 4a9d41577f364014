"""What a store needs on this machine: the error names the command that installs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rankzero import track
from rankzero.cli.main import main
from rankzero.errors import UserError
from rankzero.launch import agent
from rankzero.mlflow_store import drivers, uris
from rankzero.mlflow_store.client import MlflowRuns, mlflow_compat
from support.commands import TINY
from support.runs import T0, make_folder

DATABASE = "postgresql+psycopg2://me:hunter2@127.0.0.1:1/mlflow"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(drivers.ARTIFACT_ROOT, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("module", "uri", "installs"),
    [
        ("psycopg2", DATABASE, "pip install psycopg2-binary"),
        ("psycopg", "postgresql+psycopg://host/db", "pip install 'psycopg[binary]'"),
        ("pymysql", "mysql+pymysql://host/db", "pip install pymysql"),
    ],
)
def test_a_missing_driver_is_named(
    module: str, uri: str, installs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError) as raised:
        uris.prepare_store(uri)
    assert installs in str(raised.value) and "hunter2" not in str(raised.value)


def test_a_database_that_is_lost_ends_a_request() -> None:
    """The background processes of a run waited two hours for an answer."""
    found = drivers.with_keepalives(f"{DATABASE}?keepalives_idle=3&sslmode=require")
    assert found.startswith(f"{DATABASE}?") and "tcp_user_timeout=30000" in found
    assert "keepalives_idle=3&" in found and "sslmode=require" in found
    for other in ("http://server", "sqlite:///mlflow.db", "postgresql+pg8000://host/db"):
        assert drivers.with_keepalives(other) == other


@pytest.mark.parametrize(
    ("module", "location", "installs"),
    [
        ("boto3", "s3://bucket/path", "pip install boto3"),
        ("google", "gs://bucket", "pip install google-cloud-storage"),
        ("azure", "wasbs://c@a.blob.core.windows.net", "pip install azure-storage-blob "),
    ],
)
def test_a_missing_client_of_an_object_store_is_named(
    module: str, location: str, installs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=installs):
        mlflow_compat.artifact_repository(location, "http://server")
    drivers.require_client("mlflow-artifacts:/1/abc/artifacts")


@pytest.mark.parametrize("uri", ["mysql+nonsense://host/db", "mysql://me:hunter2@host:port/db"])
def test_an_unknown_database_is_refused(uri: str) -> None:
    with pytest.raises(UserError, match="no database that SQLAlchemy knows") as raised:
        drivers.require_driver(uri)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("root", "says"),
    [
        (None, "set MLFLOW_DEFAULT_ARTIFACT_ROOT"),
        ("./mlruns", "write an absolute path"),
        ("mlflow-artifacts:/", "is a place of MLflow's server"),
    ],
)
def test_a_database_needs_an_artifact_root(
    root: str | None,
    says: str,
    here: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here.setattr(agent, "warm_up", lambda *_, **__: None)
    if root is not None:
        here.setenv(drivers.ARTIFACT_ROOT, root)
    assert main(["train", str(TINY), "--tracking-uri", DATABASE]) == 2
    assert says in capsys.readouterr().err
    with pytest.raises(UserError, match=says):
        track("own", {}, tracking_uri=DATABASE)
    assert not list(tmp_path.glob("mlruns/runs/*"))


def test_experiments_of_a_database_are_in_its_artifact_root(
    postgres: str, here: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = MlflowRuns(postgres)
    # An offline run may be recorded without an artifact root. Its delivery needs one.
    run = make_folder(tmp_path, postgres, experiment="rooted").identity
    with pytest.raises(UserError, match=drivers.ARTIFACT_ROOT):
        store.open_run(run, T0)
    here.setenv(drivers.ARTIFACT_ROOT, str(tmp_path / "shared"))
    found = store._client.get_run(store.open_run(run, T0).run_id)
    assert found.info.artifact_uri.startswith(str(tmp_path / "shared" / "rooted"))
    # The experiment keeps its place, so nothing asks for the variable again.
    here.delenv(drivers.ARTIFACT_ROOT)
    drivers.require_place(postgres, None, "rooted")
    with pytest.raises(UserError, match=drivers.ARTIFACT_ROOT):
        drivers.require_place(postgres, None, "another")

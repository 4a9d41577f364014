"""A team's store: PostgreSQL and S3 (moto's server), and a run that goes on elsewhere."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
import pytest
from sqlalchemy import create_engine

from rankzero.catalog.lookup import mlflow_id
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store.folder import RunFolder
from support.commands import TINY, Command, free_port, losses, tracked
from support.stores import Server, private_postgres

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

BUCKET, ARTIFACTS = "team", "s3://team/artifacts"
ACCOUNT = {
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """A client of an S3 server of this machine, with a bucket."""
    port = free_port()
    words = [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=ACCOUNT["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=ACCOUNT["AWS_SECRET_ACCESS_KEY"],
        region_name=ACCOUNT["AWS_DEFAULT_REGION"],
    )
    until = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            break
        except botocore.exceptions.EndpointConnectionError:
            assert time.monotonic() < until
            time.sleep(0.1)
    yield client
    server.kill()
    server.wait()


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with private_postgres() as uri:
        yield uri


@pytest.fixture(params=["the database", "a server"])
def store(
    request: pytest.FixtureRequest,
    bucket: Any,
    database: str,
    rankzero: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """The tracking URI, as a team without and with an MLflow server has it."""
    environ = {**ACCOUNT, "MLFLOW_S3_ENDPOINT_URL": bucket.meta.endpoint_url}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    rankzero.environ |= environ
    name = request.param.replace(" ", "_")
    engine = create_engine(database, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    uri = database.rpartition("/")[0] + f"/{name}"
    if request.param == "the database":
        rankzero.environ["MLFLOW_DEFAULT_ARTIFACT_ROOT"] = ARTIFACTS
        yield uri
        return
    server = Server(tmp_path, uri, artifacts=ARTIFACTS)
    with server.running():
        yield server.uri


def test_a_run_goes_on_where_its_first_disk_is_missing(
    rankzero: Command, store: str, bucket: Any, tmp_path: Path
) -> None:
    uri = ("--tracking-uri", store)
    words = ("dropout=0.1", "augment=true", "train.eval_every=10")
    rankzero.succeed("train", TINY, *words, "train.steps=40", "--offline")
    (whole,) = rankzero.runs
    rankzero.succeed("train", TINY, *words, "train.steps=20", "--run-name", "far", *uri)
    folder = RunFolder(rankzero.folder / "mlruns" / "runs" / "far")
    run_id = mlflow_id(folder)
    folder.path.rename(tmp_path / "the first disk")
    rankzero.succeed("resume", run_id, "train.steps=40", "--experiment", TINY, *uri)
    run = tracked(folder)
    assert (run.run_id, run.status) == (run_id, "FINISHED")
    history = MlflowRuns(store).history(str(run_id), "train/loss")
    assert {point.step: point.value for point in history} == losses(whole)
    kept = bucket.list_objects_v2(Bucket=BUCKET, Prefix="artifacts/")["Contents"]
    assert {"config.yaml", "manifest.json"} <= {one["Key"].rpartition("/")[2] for one in kept}, kept

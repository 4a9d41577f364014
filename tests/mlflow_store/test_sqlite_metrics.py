"""Points that we write into MLflow's tables ourselves are those that MLflow would write."""

from __future__ import annotations

import math
import sqlite3
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Metric

from rankzero.mlflow_store import sqlite_metrics
from rankzero.mlflow_store.client.connection import log_points
from rankzero.mlflow_store.items import MetricPoint

# Few of each, so that many points are equal, or are equal but for one field.
POINTS = st.builds(
    MetricPoint,
    st.sampled_from(["train/loss", "val/accuracy", "a b.c-d_e"]),
    st.sampled_from([0.0, 1.0, -1.5, 1, math.nan, math.inf, -math.inf, 1e-320]),
    st.sampled_from([0, 5, 10**12]),
    st.sampled_from([-1, 0, 3, 10**12]),
    st.none(),
)


def path_of(uri: str) -> Path:
    return Path(uri.removeprefix("sqlite:///"))


def rows(uri: str, run_id: str) -> list[list[tuple[object, ...]]]:
    """Return what both tables have of a run."""
    columns = '"key", value, timestamp, step, is_nan, typeof(value)'
    with closing(sqlite3.connect(path_of(uri))) as database:
        return [
            sorted(database.execute(f"SELECT {columns} FROM {one} WHERE run_uuid = '{run_id}'"))  # noqa: S608
            for one in ("metrics", "latest_metrics")
        ]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(batches=[[MetricPoint("loss", value, 0, 0) for value in (0.0, math.nan)]])
@given(st.lists(st.lists(POINTS, max_size=6), min_size=1, max_size=4))
def test_they_are_what_mlflow_writes(sqlite: str, batches: list[list[MetricPoint]]) -> None:
    client = MlflowClient(sqlite)
    experiment = client.create_experiment(uuid.uuid4().hex)
    ours, mlflows = (client.create_run(experiment).info.run_id for _ in range(2))
    for points in batches:
        assert sqlite_metrics.log_points(path_of(sqlite), ours, points)
        client.log_batch(mlflows, metrics=metrics(points), synchronous=True)
    assert rows(sqlite, ours) == rows(sqlite, mlflows)


def metrics(points: Sequence[MetricPoint]) -> list[Metric]:
    return [Metric(p.key, p.value, p.milliseconds, p.step) for p in points]


@pytest.mark.parametrize(
    "point",
    [
        MetricPoint("loss(GPU)", 1.0, 0, 0),
        MetricPoint("x" * 251, 1.0, 0, 0),
        MetricPoint("loss", 1.0, -1, 0),
        MetricPoint("loss", 1.0, 0, 2**63),
    ],
)
def test_mlflow_itself_refuses_what_its_tables_do_not_take(sqlite: str, point: MetricPoint) -> None:
    client = MlflowClient(sqlite)
    run_id = client.create_run("0").info.run_id
    assert not sqlite_metrics.log_points(path_of(sqlite), run_id, [point])
    with pytest.raises(Exception, match=r"nvalid|exceed|too large"):
        log_points(client, run_id, [point])
    assert rows(sqlite, run_id) == [[], []]


def test_a_deleted_run_takes_nothing(sqlite: str) -> None:
    client = MlflowClient(sqlite)
    run_id = client.create_run("0").info.run_id
    client.delete_run(run_id)
    with pytest.raises(Exception, match="active"):
        log_points(client, run_id, [MetricPoint("loss", 1.0, 0, 0)])
    with pytest.raises(Exception, match="not found"):
        log_points(client, "0" * 32, [MetricPoint("loss", 1.0, 0, 0)])
    assert rows(sqlite, run_id) == [[], []]


def test_a_models_points_go_through_mlflow(sqlite: str) -> None:
    client = MlflowClient(sqlite)
    run_id = client.create_run("0").info.run_id
    model = client.create_logged_model("0", source_run_id=run_id).model_id
    log_points(client, run_id, [MetricPoint("loss", 1.0, 0, 0, model)])
    found = client.get_logged_model(model).metrics
    assert found is not None and [one.value for one in found] == [1.0]


def test_a_database_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        sqlite_metrics.log_points(tmp_path / "mlflow.db", "0" * 32, [MetricPoint("a", 1.0, 0, 0)])
    assert not (tmp_path / "mlflow.db").exists()

"""MLflow's client: made, given time, given batches as large as it takes."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient, set_tracking_uri
from mlflow.entities import Metric

from rankzero.mlflow_store import limits
from rankzero.mlflow_store.client.response_checks import refuse_false_answers
from rankzero.mlflow_store.items import MetricPoint
from rankzero.mlflow_store.uris import artifact_root, make_tables, prepare_store

LEAST_SECONDS, MOST_SECONDS = (
    30,
    600,
)  # for a file: a server may store the whole of it before it answers
STORED_BYTES_PER_SECOND = 2 << 20  # by a slow one


def connect(tracking_uri: str) -> MlflowClient:
    """Return a client of the store; a local database is made where there is none. Raises TrackingError."""
    refuse_false_answers()
    prepare_store(tracking_uri)
    root = artifact_root(tracking_uri)
    if (
        root is not None
    ):  # else experiments made beside a database keep artifacts in the current directory
        os.environ.setdefault("_MLFLOW_SERVER_ARTIFACT_ROOT", root)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # deprecations between MLflow and sqlalchemy: nothing to do for us
        make_tables(
            tracking_uri,
            lambda uri: MlflowClient(tracking_uri=uri).search_experiments(max_results=1),
        )
        client = MlflowClient(tracking_uri=tracking_uri)
    logging.getLogger("mlflow").setLevel(
        logging.CRITICAL
    )  # each error comes to us as an exception as well
    logging.getLogger("alembic").setLevel(logging.ERROR)
    return client


def log_points(client: MlflowClient, run_id: str, points: Sequence[MetricPoint]) -> None:
    """Send the points, at most a thousand at a time. Sending one again changes nothing."""
    for chunk in chunks(points, limits.METRICS_PER_BATCH):
        metrics = [
            Metric(p.key, p.value, p.milliseconds, p.step, model_id=p.model_id) for p in chunk
        ]
        client.log_batch(run_id, metrics=metrics, synchronous=True)


def chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """Yield the items in lists of at most `size`."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


@contextlib.contextmanager
def patience(path: Path | None = None) -> Iterator[None]:
    """Let MLflow wait long for an answer: a big file takes longer than a metric.

    `path`: what is uploaded, a file or a folder; None where nobody knows how much there is. An answer that a broken
    connection swallowed is waited for as long.
    """
    name = "MLFLOW_HTTP_REQUEST_TIMEOUT"
    before = os.environ.get(name)
    seconds = (
        MOST_SECONDS if path is None else LEAST_SECONDS + size_of(path) // STORED_BYTES_PER_SECOND
    )
    os.environ[name] = str(max(min(seconds, MOST_SECONDS), int(before or 0)))
    try:
        yield
    finally:
        os.environ[name] = before or "10"


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; what is gone by now has none."""
    total = 0
    for file in path.rglob("*") if path.is_dir() else (path,):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


@contextlib.contextmanager
def as_everybodys(tracking_uri: str) -> Iterator[None]:
    """Make the store this process's own for the duration of the block."""
    set_tracking_uri(tracking_uri)
    try:
        yield
    finally:
        set_tracking_uri(None)  # type: ignore[arg-type]

"""MLflow's client: connect, batch metrics, wait long enough for big files."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from rankzero.mlflow_store import drivers, limits, sqlite_metrics
from rankzero.mlflow_store.client import mlflow_compat
from rankzero.mlflow_store.items import MetricPoint
from rankzero.mlflow_store.uris import artifact_root, make_tables, prepare_store, sqlite_path

_T = TypeVar("_T")
# Timeouts of a request with a file. A server may store all of it before it answers.
MIN_FILE_SECONDS, MAX_FILE_SECONDS = 30, 600
# The longest wait for an answer. A courier that gives up takes as long, and a minute.
_MAX_SECONDS = 40
# A slow server's speed.
STORED_BYTES_PER_SECOND = 2 << 20


def connect(tracking_uri: str) -> MlflowClient:
    """Return a client of the store. Creates a local database. Raises TrackingError."""
    mlflow_compat.prepare()
    prepare_store(tracking_uri)
    tracking_uri = drivers.with_keepalives(tracking_uri)
    with warnings.catch_warnings():
        # Deprecations between MLflow and sqlalchemy.
        warnings.simplefilter("ignore")
        with mlflow_compat.default_artifacts_below(artifact_root(tracking_uri)):
            make_tables(
                tracking_uri,
                lambda uri: MlflowClient(tracking_uri=uri).search_experiments(max_results=1),
            )
        return cast("MlflowClient", _PatientClient(MlflowClient(tracking_uri=tracking_uri)))


class _PatientClient:
    """MLflow's client, which waits longer for each next answer after one that came too late.

    A server still works on a request that timed out. With a fixed limit, many couriers would
    send a slow server the same batches again and again. So would MLflow's own second try, which
    is for connections that break. Not for several threads at once.
    """

    def __init__(self, client: MlflowClient) -> None:
        # By method: a server that answers reads at once may need long for a batch.
        self._client, self._seconds = client, dict[str, int]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return functools.partial(self._request, name, found) if callable(found) else found

    def _request(
        self, name: str, send: Callable[..., Any], /, *arguments: Any, **options: Any
    ) -> Any:
        began = time.monotonic()
        seconds = self._seconds.get(name, max(self._seconds.values(), default=0))
        with mlflow_compat.request_timeout(seconds, once=seconds > 0) as limit:
            try:
                return send(*arguments, **options)
            finally:
                took = time.monotonic() - began
                # Also if MLflow's second try was answered.
                if took >= limit:
                    seconds = min(2 * limit, _MAX_SECONDS)
                elif took < limit / 4:
                    seconds //= 2
                self._seconds[name] = seconds


def log_points(client: MlflowClient, run_id: str, points: Sequence[MetricPoint]) -> None:
    """Send the points. Sending one again changes nothing. A server gets a thousand at a time."""
    database = sqlite_path(str(client.tracking_uri))
    if database is not None and sqlite_metrics.log_points(database, run_id, points):
        return
    for chunk in chunks(points, limits.METRICS_PER_BATCH):
        metrics = [
            Metric(p.key, p.value, p.milliseconds, p.step, model_id=p.model_id) for p in chunk
        ]
        client.log_batch(run_id, metrics=metrics, synchronous=True)


def all_found(search: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Any]:
    """Yield what a search of MLflow's client finds, of all its pages."""
    page = search(*arguments, **options)
    yield from page
    while page.token:
        page = search(*arguments, **options, page_token=page.token)
        yield from page


def if_known(read: Callable[[str], _T], identifier: str) -> _T | None:
    """Return what `read` has of a run or a model, or None if MLflow does not know its id."""
    try:
        return read(identifier)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """Yield the items in lists of at most `size`."""
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


@contextlib.contextmanager
def patience(path: Path | None = None) -> Iterator[None]:
    """Wait longer for an answer, by the size of a file or folder; None: as long as ever."""
    # An answer that a broken connection swallowed is waited for as long, hence no flat maximum.
    seconds = MAX_FILE_SECONDS
    if path is not None:
        size = 0
        for file in path.rglob("*") if path.is_dir() else (path,):
            # Retention may delete a checkpoint's files meanwhile.
            with contextlib.suppress(FileNotFoundError):
                size += file.stat().st_size if file.is_file() else 0
        seconds = min(seconds, MIN_FILE_SECONDS + size // STORED_BYTES_PER_SECOND)
    with mlflow_compat.request_timeout(seconds):
        yield

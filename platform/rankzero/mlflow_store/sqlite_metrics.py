"""Points of metrics, written into the tables of MLflow's SQLite database.

MLflow's own client makes an object of each row, and checks it three times. That takes 90 us of
processor time for a point. It is done only for the version of MLflow whose tables are in this
package (`ready_tables`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import operator
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

from rankzero.mlflow_store import limits, ready_tables
from rankzero.mlflow_store.items import MetricPoint

_LOCKED_SECONDS = 20.0  # MLflow's own
_ACTIVE = "SELECT 1 FROM runs WHERE run_uuid = ? AND lifecycle_stage = 'active'"
_COLUMNS = '("key", value, timestamp, step, is_nan, run_uuid) VALUES (?, ?, ?, ?, ?, ?)'
_INSERT = f"""INSERT INTO metrics {_COLUMNS}
ON CONFLICT ("key", timestamp, step, run_uuid, value, is_nan) DO NOTHING"""
_LATEST = f"""INSERT INTO latest_metrics {_COLUMNS}
ON CONFLICT ("key", run_uuid) DO UPDATE SET value = excluded.value, step = excluded.step,
    timestamp = excluded.timestamp, is_nan = excluded.is_nan
WHERE (excluded.step, excluded.timestamp, excluded.value)
    > (latest_metrics.step, latest_metrics.timestamp, latest_metrics.value)"""
_Row = tuple[str, float, int, int, bool, str]


def log_points(database: Path, run_id: str, points: Sequence[MetricPoint]) -> bool:
    """Write the points of a run in one transaction. Writing one again changes nothing.

    Returns whether it did. If not, MLflow has to, or to say why it will not: another version of
    MLflow, a run that was deleted, a model's points, or values that its tables do not take.
    Raises sqlite3.Error if the database is locked, full or gone.
    """
    if not _knows_the_tables() or not all(map(_is_plain, points)):
        return False
    rows = [_row(point, run_id) for point in points]
    latest = dict[str, _Row]()
    # As MLflow does, by step, time and value; the first of equal ones.
    for row in sorted(rows, key=lambda row: (row[3], row[2], row[1]), reverse=True):
        latest.setdefault(row[0], row)
    uri = f"{database.absolute().as_uri()}?mode=rw"
    with contextlib.closing(
        sqlite3.connect(uri, uri=True, timeout=_LOCKED_SECONDS, isolation_level=None)
    ) as connection:
        connection.execute("BEGIN IMMEDIATE")
        if connection.execute(_ACTIVE, (run_id,)).fetchone() is None:
            return False
        # In the table's order, which takes half the time if there are many metrics.
        connection.executemany(_INSERT, sorted(rows, key=operator.itemgetter(0, 2, 3)))
        connection.executemany(_LATEST, latest.values())
        connection.execute("COMMIT")
    return True


@functools.cache
def _knows_the_tables() -> bool:
    return ready_tables.file_of(importlib.metadata.version("mlflow")).exists()


def _is_plain(point: MetricPoint) -> bool:
    is_legal = _is_legal(point.key) and point.model_id is None
    return is_legal and 0 <= point.milliseconds <= sys.maxsize and abs(point.step) <= sys.maxsize


@functools.lru_cache(10_000)
def _is_legal(key: str) -> bool:
    return limits.name(key) == key


def _row(point: MetricPoint, run_id: str) -> _Row:
    value = point.value
    if is_nan := math.isnan(value):
        value = 0.0
    elif math.isinf(value):  # SQL has neither
        value = math.copysign(sys.float_info.max, value)
    return point.key, value, point.milliseconds, point.step, is_nan, run_id

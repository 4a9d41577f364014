"""The empty tables of MLflow's SQLite database, as SQL, for the version of MLflow in the lock.

MLflow makes them by sixty migrations. That takes 1.2 s of processor time, and on a busy disk much
longer, because each migration waits for it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path


def file_of(mlflow_version: str) -> Path:
    """Return the file with the tables of a version of MLflow. Most versions have none."""
    return Path(__file__).with_name("tables") / f"mlflow_{mlflow_version}.sql"


def create(database: Path, mlflow_version: str) -> None:
    """Create the tables in a new database; leave them to MLflow if its version has no file."""
    file = file_of(mlflow_version)
    if file.exists():
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.executescript(file.read_text(encoding="utf-8"))

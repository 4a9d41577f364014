"""An empty store, and a scenario's folder without a run."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from rankzero.mlflow_store.client import MlflowRuns
from torture.ground import Ground


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without a run. To copy it is quicker than to create one."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowRuns(f"sqlite:///{path}")
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


@pytest.fixture
def place(tmp_path: Path, empty: Path) -> Ground:
    """A scenario's folder in which no command has run yet."""
    return Ground(tmp_path / "ground", 1, empty)

"""The ready-made tables are those of MLflow's own migrations."""

from __future__ import annotations

import importlib.metadata
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from rankzero.mlflow_store import ready_tables
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.uris import prepare_store

VERSION = importlib.metadata.version("mlflow")


def lines(script: str) -> list[str]:
    """Return the lines, sorted: MLflow orders indices and constraints by chance."""
    return sorted(line.strip().rstrip(",") for line in script.splitlines())


def test_they_are_the_tables_that_mlflow_makes(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    database = tmp_path / "mlflow.db"
    MlflowClient(f"sqlite:///{database}").search_experiments(max_results=1)
    with closing(sqlite3.connect(database)) as store:
        # Its place differs from store to store, so MLflow adds it to each.
        store.execute("DELETE FROM experiments")
        made = "\n".join(store.iterdump()) + "\n"
    file = ready_tables.file_of(VERSION)
    if os.environ.get("RANKZERO_WRITE_TABLES"):
        file.write_text(made, encoding="utf-8")
    assert file.exists(), f"there are no tables of MLflow {VERSION}: run make tables"
    assert lines(file.read_text(encoding="utf-8")) == lines(made)


def test_a_new_store_has_them_and_its_own_place_for_artifacts(tmp_path: Path) -> None:
    prepare_store(f"sqlite:///{tmp_path}/mlflow.db")
    MlflowRuns(f"sqlite:///{tmp_path}/mlflow.db")
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        found = store.execute("SELECT experiment_id, artifact_location FROM experiments").fetchall()
        assert found == [(0, f"{tmp_path}/artifacts/0")]
        assert store.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_another_version_of_mlflow_makes_its_own_tables(tmp_path: Path) -> None:
    ready_tables.create(tmp_path / "mlflow.db", "3.17.0.dev1")
    assert not (tmp_path / "mlflow.db").exists()

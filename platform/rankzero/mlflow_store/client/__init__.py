"""The only package that imports mlflow: runs, metrics, artifacts, checkpoints, models by their ids.

The import takes seconds. The courier imports it, and so do the commands that read the store.
Nothing here retries: the courier does.
"""

from __future__ import annotations

# First, because it sets the environment that mlflow reads when it is imported.
from rankzero.mlflow_store.client import mlflow_compat  # noqa: F401  # isort: split
from rankzero.mlflow_store.client.records import RemoteCheckpoint, RunRecord
from rankzero.mlflow_store.client.runs import MlflowRuns

__all__ = ["MlflowRuns", "RemoteCheckpoint", "RunRecord"]

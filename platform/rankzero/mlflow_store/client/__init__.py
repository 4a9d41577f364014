"""MLflow, and the only place that imports it: runs, metrics, artifacts, checkpoints and models by explicit ids.

Importing this costs seconds, so it is imported where it is used: in the recorder, and in the
commands that read the store. Nothing here retries; that is the recorder's work.
"""

from __future__ import annotations

import os
import warnings

# MLflow reads these when imported or at each call. Its own patience, 4 minutes a call, would hold up the recorder.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}.items():
    os.environ.setdefault(_name, _value)

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore"
    )  # deprecations among MLflow's dependencies: nothing for our users to mend
    import mlflow.store.artifact.artifact_repository_registry  # noqa: F401

from rankzero.mlflow_store.client.records import OpenRun, RemoteCheckpoint, RunRecord  # noqa: E402
from rankzero.mlflow_store.client.runs import MlflowRuns  # noqa: E402

__all__ = ["MlflowRuns", "OpenRun", "RemoteCheckpoint", "RunRecord"]

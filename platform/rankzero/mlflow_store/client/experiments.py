"""Experiments: find or create them, choose the folder of their artifacts."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shlex

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from rankzero.mlflow_store import drivers
from rankzero.mlflow_store.client import mlflow_compat
from rankzero.mlflow_store.client.connection import connect
from rankzero.mlflow_store.client.records import require_id
from rankzero.mlflow_store.uris import ExperimentGone, artifact_root
from rankzero.redaction.text import url_without_secrets
from rankzero.run_store.folder import Identity

_LONGEST_FOLDER = 200


def restore_command(tracking_uri: str, experiment_id: str) -> str:
    """Return the command that brings a deleted experiment back, with all of its runs."""
    # Without the store's address, mlflow would make one in the current folder.
    store = f"MLFLOW_TRACKING_URI={shlex.quote(url_without_secrets(tracking_uri))}"
    return f"{store} mlflow experiments restore -x {experiment_id}"


def find_or_create(
    client: MlflowClient, tracking_uri: str, identity: Identity, experiment_id: str | None = None
) -> str:
    """Return the id of the run's experiment, which another process may create at the same time.

    `experiment_id`: the experiment, if it is known. Raises ExperimentGone if somebody deleted it.
    """
    for _ in range(2):
        experiment = (
            client.get_experiment_by_name(identity.experiment)
            if experiment_id is None
            else client.get_experiment(experiment_id)
        )
        if experiment is not None:
            if experiment.lifecycle_stage == "deleted":
                restore = restore_command(tracking_uri, experiment.experiment_id)
                raise ExperimentGone(
                    f"the MLflow experiment {identity.experiment!r} was deleted: use another name, "
                    f"or: {restore}"
                )
            return require_id(experiment.experiment_id, "experiment")
        with contextlib.suppress(MlflowException):
            return _create(client, tracking_uri, identity)
    return _create(client, tracking_uri, identity)


def artifact_locations(tracking_uri: str) -> set[str]:
    """Return where a server's latest experiments have their artifacts. Refuses an old server."""
    client = connect(tracking_uri)
    found = client.search_experiments(max_results=10)
    mlflow_compat.refuse_old_server(client)
    return {experiment.artifact_location or "" for experiment in found}


def folder_for(experiment: str) -> str:
    """Return a folder's name for an experiment's name: never ``..``, never too long."""
    # Nothing is quoted, because MLflow takes the path for a URI and unquotes it.
    plain = re.sub(r"[^A-Za-z0-9_.\-]", "_", experiment)
    if plain == experiment and not plain.startswith(".") and len(plain) <= _LONGEST_FOLDER:
        return plain
    digest = hashlib.sha256(experiment.encode()).hexdigest()[:8]
    return f"{plain.lstrip('.')[: _LONGEST_FOLDER - 9]}-{digest}"


def _create(client: MlflowClient, tracking_uri: str, identity: Identity) -> str:
    # Without the tag, MLflow's page takes the experiment for one of language agents.
    kind = {"mlflow.experimentKind": "custom_model_development"}
    base = identity.artifact_root or artifact_root(tracking_uri)
    drivers.require_artifact_root(tracking_uri, base)
    location = None if base is None else f"{base.rstrip('/')}/{folder_for(identity.experiment)}"
    experiment_id = client.create_experiment(identity.experiment, location, tags=kind)
    return require_id(experiment_id, "experiment")

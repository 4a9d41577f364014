"""Experiments: found or made, whoever is faster; where their artifacts go."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from rankzero.mlflow_store.client.records import known
from rankzero.mlflow_store.uris import TrackingError, artifact_root
from rankzero.redaction.text import url_without_secrets
from rankzero.run_store.folder import Identity

LONGEST_FOLDER = 200


def find_or_create(client: MlflowClient, tracking_uri: str, identity: Identity) -> str:
    """Return the id of the run's experiment, made if it is not there, by us or by whoever is faster.

    Raises TrackingError for one that somebody deleted.
    """
    for _ in range(2):
        experiment = client.get_experiment_by_name(identity.experiment)
        if experiment is not None:
            if experiment.lifecycle_stage == "deleted":
                raise TrackingError(
                    f"the MLflow experiment {identity.experiment!r} was deleted; use another name, "
                    f"or: mlflow experiments restore -x {experiment.experiment_id}"
                )
            return known(experiment.experiment_id, "experiment")
        with contextlib.suppress(MlflowException):
            return _create(client, tracking_uri, identity)
    return _create(client, tracking_uri, identity)


def ids(client: MlflowClient, tracking_uri: str, name: str | None) -> list[str]:
    """Return the id of the experiment, or of all where no name is given. Raises TrackingError where it is unknown."""
    if name is None:
        return [experiment.experiment_id for experiment in client.search_experiments()]
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        raise TrackingError(
            f"no experiment is called {name!r} in {url_without_secrets(tracking_uri)}"
        )
    return [experiment.experiment_id]


def set_tag(
    client: MlflowClient,
    experiment: str,
    tag: str,
    value: str,
    may_replace: Callable[[str | None], bool],
) -> str | None:
    """Set an experiment's tag where what it has `may_replace`; return the experiment's id, None without one."""
    found = client.get_experiment_by_name(experiment)
    if found is None or found.lifecycle_stage == "deleted":
        return None
    known = found.tags.get(tag)
    if known != value and may_replace(known):
        client.set_experiment_tag(found.experiment_id, tag, value)
    return str(found.experiment_id)


def folder_for(experiment: str) -> str:
    """Return the name of one folder for any experiment's name: never ``..``, nor longer than a file system takes."""
    plain = re.sub(
        r"[^A-Za-z0-9_.\-]", "_", experiment
    )  # nothing quoted: MLflow takes it for a URI and would unquote it
    if plain == experiment and not plain.startswith(".") and len(plain) <= LONGEST_FOLDER:
        return plain
    return f"{plain.lstrip('.')[: LONGEST_FOLDER - 9]}-{hashlib.sha256(experiment.encode()).hexdigest()[:8]}"


def _create(client: MlflowClient, tracking_uri: str, identity: Identity) -> str:
    kind = {
        "mlflow.experimentKind": "custom_model_development"
    }  # else the UI takes it for one of language agents
    base = identity.artifact_root or artifact_root(tracking_uri)
    location = None if base is None else f"{base.rstrip('/')}/{folder_for(identity.experiment)}"
    return known(client.create_experiment(identity.experiment, location, tags=kind), "experiment")

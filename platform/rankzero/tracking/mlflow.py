"""MLflow, and the only file that imports it: runs, metrics, artifacts and checkpoints by explicit ids.

Importing this costs seconds, so it is imported where it is used: in the recorder, and in the
commands that read the store. Nothing here retries; that is the recorder's work.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import shutil
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# MLflow reads these when it is imported or at each call. Its own patience (4 minutes a call) would hold up the recorder.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
}.items():
    os.environ.setdefault(_name, _value)

import requests  # noqa: E402
from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import LoggedModel, LoggedModelOutput, Metric, Param, Run, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository  # noqa: E402

from rankzero.events import CheckpointSaved, RunEnded, RunStarted  # noqa: E402
from rankzero.tracking import legal  # noqa: E402
from rankzero.tracking.delivery import Point  # noqa: E402
from rankzero.tracking.journal import Identity  # noqa: E402
from rankzero.tracking.store import TrackingError, artifact_root, prepare_store  # noqa: E402

UPLOAD_SECONDS = 600  # a server may store a whole file before it answers
NEVER = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}
RETRYABLE_STATUS = {401, 403, 404, 408, 409, 425, 429}


class RunGone(TrackingError):
    """Someone deleted the run in MLflow; it takes nothing any more."""


class OpenRun(NamedTuple):
    """A run to write to; `marks`: metric -> highest step that MLflow has."""

    run_id: str
    experiment_id: str
    marks: dict[str, int]


class Checkpoint(NamedTuple):
    """A checkpoint as MLflow knows it; `status` is READY once it is whole."""

    step: int
    model_id: str
    status: str
    best: bool
    tags: Mapping[str, str]


class RunRecord(NamedTuple):
    """A run as the command line lists it."""

    name: str
    run_id: str
    experiment_id: str
    status: str
    start_time: float
    goal: str | None
    best: float | None
    samples_per_second: float | None
    metrics: Mapping[str, float]
    params: Mapping[str, str]
    tags: Mapping[str, str]


def refusal(error: BaseException) -> str | None:
    """Return why MLflow will never take this; None where another try may help."""
    if isinstance(error, MlflowException):
        return str(error) if error.error_code in NEVER else None
    if isinstance(error, requests.HTTPError) and error.response is not None:
        status = error.response.status_code
        return str(error) if 400 <= status < 500 and status not in RETRYABLE_STATUS else None
    return None


class Tracker:
    """The runs of one tracking store. Not for use by several threads at once."""

    def __init__(self, tracking_uri: str) -> None:
        prepare_store(tracking_uri)
        root = artifact_root(tracking_uri)
        if root is not None:  # else experiments made beside a database keep artifacts in the current directory
            os.environ.setdefault("_MLFLOW_SERVER_ARTIFACT_ROOT", root)
        self._uri = tracking_uri
        self._client = MlflowClient(tracking_uri=tracking_uri)
        logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # each error comes to us as an exception as well
        logging.getLogger("alembic").setLevel(logging.ERROR)

    def open_run(self, identity: Identity, start_seconds: float) -> OpenRun:
        """Return the identity's run, made if it is not there; the same run however often it is called."""
        found = self.find_open_run(identity)
        if found is not None:
            return found
        run = self._client.create_run(
            self._experiment_id(identity), start_time=int(start_seconds * 1000), run_name=identity.name,
            tags=_birth_tags(identity),
        )
        return OpenRun(run.info.run_id, run.info.experiment_id, {})

    def find_open_run(self, identity: Identity) -> OpenRun | None:
        """Return the identity's run; None where nobody has made it yet."""
        if identity.mlflow_run_id is not None:
            return _opened(self._client.get_run(identity.mlflow_run_id))
        experiment = self._client.get_experiment_by_name(identity.experiment)
        if experiment is None:
            return None
        runs = self._client.search_runs(
            [experiment.experiment_id], f"tags.`rankzero.uuid` = '{identity.uuid}'", max_results=1
        )
        return _opened(runs[0]) if runs else None

    def start_attempt(self, run_id: str, event: RunStarted) -> None:
        """Set the run to RUNNING and log its params and tags.

        A param is for ever: where a later attempt's differs, the first stays and the new one becomes a tag.
        """
        run = self._client.get_run(run_id)
        tags = {**event.environment, "rankzero.attempt": str(event.attempt)}
        if "goal.metric" in event.params:
            tags["rankzero.goal"] = event.params["goal.metric"]
        new = {}
        for key, value in event.params.items():
            name, value = legal.name(key), legal.head(value, legal.PARAM_LENGTH)
            known = run.data.params.get(name)
            if known is None:
                new[name] = value
            elif known != value:
                tags[f"rankzero.param.{key}"] = value
        for chunk in _chunks([Param(*pair) for pair in new.items()], legal.ITEMS_PER_BATCH):
            self._client.log_batch(run_id, params=chunk, synchronous=True)
        self.set_tags(run_id, tags)
        if run.info.status != "RUNNING":
            self._client.update_run(run_id, status="RUNNING")

    def log_metrics(self, run_id: str, points: Sequence[Point]) -> None:
        """Send the points, at most a thousand at a time. Sending one again changes nothing."""
        for chunk in _chunks(points, legal.METRICS_PER_BATCH):
            metrics = [Metric(p.key, p.value, p.milliseconds, p.step, model_id=p.model_id) for p in chunk]
            self._client.log_batch(run_id, metrics=metrics, synchronous=True)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set the tags, made legal."""
        legal_tags = [RunTag(legal.name(key), legal.head(value, legal.TAG_LENGTH)) for key, value in tags.items()]
        for chunk in _chunks(legal_tags, legal.ITEMS_PER_BATCH):
            self._client.log_batch(run_id, tags=chunk, synchronous=True)

    def close_run(self, run_id: str, event: RunEnded, description: str) -> None:
        """Give the run its end: status, reason, the end of the traceback, a description in Markdown."""
        tags = {"rankzero.reason": event.reason, "mlflow.note.content": description}
        if event.error:
            tags["rankzero.error"] = legal.tail(event.error, legal.TAG_LENGTH)
        self.set_tags(run_id, tags)
        self._client.set_terminated(run_id, event.status, end_time=int(event.time * 1000))

    def require_run(self, run_id: str) -> None:
        """Raise RunGone when the run was deleted, and whatever MLflow raises when it cannot be asked."""
        try:
            stage = self._client.get_run(run_id).info.lifecycle_stage
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            stage = "deleted"
        if stage == "deleted":
            raise RunGone(f"the MLflow run {run_id} was deleted")

    def log_artifact(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Upload a file into the run's artifacts, into `folder` there."""
        with _patience():
            self._client.log_artifact(run_id, str(path), folder)

    def log_artifacts(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Upload what is in the folder `path`."""
        with _patience():
            self._client.log_artifacts(run_id, str(path), folder)

    def save_checkpoint(self, run: OpenRun, event: CheckpointSaved, folder: Path,
                        points: Callable[[str], Sequence[Point]]) -> str:
        """Upload the checkpoint's folder as a logged model and return its id; again: nothing happens.

        `points` gives the metrics to link to the model. The model is READY only when all of it is there;
        what an upload that was cut short has left is deleted. Raises FileNotFoundError when the folder goes meanwhile.
        """
        saved_at = repr(event.time)
        models = self._checkpoint_models(run, event.step)
        whole = [m for m in models if m.status == "READY" and m.tags.get("rankzero.saved_at") == saved_at]
        for model in models:
            if model not in whole:
                self.delete_checkpoint(model.model_id)
        model_id = whole[0].model_id if whole else self._upload_checkpoint(run, event, folder, points)
        self._link_output(run, model_id, event.step)
        if event.best:
            self._unmark_best(run, but=model_id)
        return model_id

    def list_checkpoints(self, run: OpenRun) -> list[Checkpoint]:
        """Return the run's checkpoints by step, those whose upload was cut short included."""
        models = self._checkpoint_models(run)
        return sorted(
            Checkpoint(int(m.tags["rankzero.step"]), m.model_id, str(m.status), m.tags.get("rankzero.best") == "true",
                       m.tags)
            for m in models
        )

    def delete_checkpoints(self, run: OpenRun, step: int) -> None:
        """Delete the checkpoints of `step`, bytes included."""
        for model in self._checkpoint_models(run, step):
            self.delete_checkpoint(model.model_id)

    def delete_checkpoint(self, model_id: str) -> None:
        """Delete the logged model, bytes included. MLflow alone would only hide it and keep the bytes."""
        location = self._client.get_logged_model(model_id).artifact_location
        with _patience():
            get_artifact_repository(location, tracking_uri=self._uri).delete_artifacts()
        self._client.delete_logged_model(model_id)

    def download_checkpoint(self, model_id: str, destination: Path) -> Path:
        """Download the checkpoint's files into the folder `destination`, made if need be, and return it."""
        destination.mkdir(parents=True, exist_ok=True)
        location = self._client.get_logged_model(model_id).artifact_location
        with _patience():
            get_artifact_repository(location, tracking_uri=self._uri).download_artifacts("", str(destination))
        return destination

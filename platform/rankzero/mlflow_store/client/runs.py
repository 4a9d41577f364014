"""The runs of one tracking store."""

from __future__ import annotations

import contextlib
import getpass
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlflow.entities import Param, Run, RunTag
from mlflow.exceptions import MlflowException

from rankzero import scalars
from rankzero.events import DataDescribed, RunEnded, RunStarted
from rankzero.mlflow_store import limits
from rankzero.mlflow_store.client import experiments
from rankzero.mlflow_store.client.artifact_locations import ArtifactLocations
from rankzero.mlflow_store.client.connection import chunks, connect, log_points, patience
from rankzero.mlflow_store.client.datasets import dataset_input
from rankzero.mlflow_store.client.images import write_images
from rankzero.mlflow_store.client.models import MlflowModels
from rankzero.mlflow_store.client.records import OpenRun, RunRecord, known, opened, record
from rankzero.mlflow_store.items import DESCRIPTION, MetricPoint
from rankzero.mlflow_store.uris import RunGone, TrackingError
from rankzero.redaction.text import url_without_secrets
from rankzero.run_store.folder import Identity

LOGGED_IMAGES = "mlflow.loggedImages"


class MlflowRuns:
    """The runs of one tracking store; `models`: its checkpoints and models. Not for use by several threads at once."""

    def __init__(self, tracking_uri: str) -> None:
        self._uri = tracking_uri
        self._client = connect(tracking_uri)
        self._places = ArtifactLocations(self._client, tracking_uri)
        self.models = MlflowModels(self._client, tracking_uri, self._places)

    def open_run(self, identity: Identity, start_seconds: float) -> OpenRun:
        """Return the identity's run, made if it is not there; the same run however often it is called."""
        found = self.find_open_run(identity)
        if found is not None:
            return found
        run = self._client.create_run(
            experiments.find_or_create(self._client, self._uri, identity),
            start_time=int(start_seconds * 1000),
            run_name=identity.name,
            tags=_birth_tags(identity),
        )
        return opened(run)

    def find_open_run(self, identity: Identity) -> OpenRun | None:
        """Return the identity's run; None where nobody has made it yet."""
        if identity.mlflow_run_id is not None:
            return opened(self._client.get_run(identity.mlflow_run_id))
        experiment = self._client.get_experiment_by_name(identity.experiment)
        if experiment is None:
            return None
        runs = self._client.search_runs(
            [experiment.experiment_id], f"tags.`rankzero.uuid` = '{identity.uuid}'", max_results=1
        )
        return opened(runs[0]) if runs else None

    def start_attempt(self, run_id: str, event: RunStarted) -> None:
        """Set the run to RUNNING and log its params and tags.

        A param is for ever: where a later attempt's differs, the first stays and the new one becomes a tag.
        """
        run = self._run(run_id)
        tags = {**event.environment, "rankzero.attempt": str(event.attempt)}
        if "goal.metric" in event.params:
            tags["rankzero.goal"] = event.params["goal.metric"]
        new, names = {}, limits.names(event.params)
        for key, value in event.params.items():
            name, value = names[key], limits.head(value, limits.PARAM_LENGTH)
            known = run.data.params.get(name)
            if known is None:
                new[name] = value
            elif known != value:
                tags[f"rankzero.param.{key}"] = value
        for chunk in chunks([Param(*pair) for pair in new.items()], limits.ITEMS_PER_BATCH):
            self._client.log_batch(run_id, params=chunk, synchronous=True)
        self.set_tags(run_id, tags)
        if run.info.status != "RUNNING":
            self._client.update_run(run_id, status="RUNNING")

    def log_data(self, run_id: str, event: DataDescribed) -> None:
        """Log a data set as the run's input, where MLflow shows and filters data sets. Again: nothing happens."""
        self._client.log_inputs(run_id, [dataset_input(event)])

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Send the points, at most a thousand at a time. Sending one again changes nothing."""
        log_points(self._client, run_id, points)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set the tags, made legal."""
        legal_tags = [
            RunTag(limits.name(key), limits.head(value, limits.TAG_LENGTH))
            for key, value in tags.items()
        ]
        for chunk in chunks(legal_tags, limits.ITEMS_PER_BATCH):
            self._client.log_batch(run_id, tags=chunk, synchronous=True)

    def description(self, run_id: str) -> str:
        """Return what the run's page says now: users may write there, too."""
        return str(self._run(run_id).data.tags.get(DESCRIPTION, ""))

    def close_run(self, run_id: str, event: RunEnded) -> None:
        """Set the run's status and when it ended. Raises TrackingError where it has another status after that."""
        self._client.set_terminated(run_id, event.status, end_time=scalars.milliseconds(event.time))
        status = self._run(run_id).info.status
        if status != event.status:
            raise TrackingError(
                f"MLflow says that the run is {status}, after it was told that it is {event.status}"
            )

    def require_run(self, run_id: str) -> None:
        """Raise RunGone when the run was deleted, and whatever MLflow raises when it cannot be asked."""
        try:
            stage = self._run(run_id).info.lifecycle_stage
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            stage = "deleted"
        if stage == "deleted":
            raise RunGone(f"the MLflow run {run_id} was deleted")

    def log_artifact(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Upload a file into the run's artifacts, into `folder` there."""
        with patience(path):
            self._places.of_run(run_id).upload_file(path, folder)

    def log_artifacts(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Upload what is in the folder `path`."""
        with patience(path):
            self._places.of_run(run_id).upload_folder(path, folder)

    def log_pictures(
        self, run_id: str, pictures: Mapping[str, Path], step: int, milliseconds: int
    ) -> None:
        """Upload PNGs by key, so that MLflow's page shows each key's pictures by step; again: the same files.

        The newest of each also goes to ``pictures/<key>.png``. Raises Impossible for what cannot be made smaller.
        """
        with tempfile.TemporaryDirectory(prefix="rankzero-") as folder:
            write_images(pictures, Path(folder), run_id, step, milliseconds)
            with patience(Path(folder)):
                self._places.of_run(run_id).upload_folder(Path(folder))
        self.set_tags(run_id, {LOGGED_IMAGES: "True"})

    def list_runs(self, experiment: str | None = None, limit: int = 50) -> list[RunRecord]:
        """Return the newest runs first, of one experiment or of all."""
        runs = self._client.search_runs(
            experiments.ids(self._client, self._uri, experiment),
            max_results=limit,
            order_by=["attributes.start_time DESC"],
        )
        return [record(run) for run in runs]

    def find_run(self, name_or_id: str) -> RunRecord:
        """Return the run of this id, or else the newest of this name. Raises TrackingError when there is none."""
        with contextlib.suppress(MlflowException):  # no legal id, or nobody's
            return record(self._run(name_or_id))
        name = name_or_id.replace("'", "")
        runs = self._client.search_runs(
            experiments.ids(self._client, self._uri, None),
            f"attributes.run_name = '{name}'",
            max_results=1,
            order_by=["attributes.start_time DESC"],
        )
        if not runs:
            raise TrackingError(
                f"no run is called {name_or_id!r} in {url_without_secrets(self._uri)}"
            )
        return record(runs[0])

    def experiment_name(self, experiment_id: str) -> str:
        """Return the name of an experiment."""
        return str(self._client.get_experiment(experiment_id).name)

    def save_view(
        self, experiment: str, tag: str, value: str, may_replace: Callable[[str | None], bool]
    ) -> str | None:
        """Set an experiment's tag where what it has `may_replace`; return the experiment's id, None without one."""
        return experiments.set_tag(self._client, experiment, tag, value, may_replace)

    def download_artifact(self, run_id: str, name: str, folder: Path) -> Path:
        """Download one of the run's artifacts into the folder and return its path. Raises TrackingError without it."""
        listed = self._client.list_artifacts(run_id, str(Path(name).parent).strip("."))
        size = next((found.file_size for found in listed if found.path == name), -1)
        if size == -1:
            raise TrackingError(f"the MLflow run {run_id} has no artifact {name!r}")
        with patience():
            path = Path(self._client.download_artifacts(run_id, name, str(folder)))
        if size is not None and path.stat().st_size != size:  # MLflow sees no difference
            raise TrackingError(
                f"of {name!r}, {path.stat().st_size} of {size} bytes came from MLflow; try again"
            )
        return path

    def history(self, run_id: str, key: str) -> list[MetricPoint]:
        """Return every point of a metric, by step."""
        metrics = self._client.get_metric_history(run_id, key)
        points = [
            MetricPoint(metric.key, metric.value, metric.timestamp, metric.step)
            for metric in metrics
        ]
        return sorted(points, key=lambda point: (point.step, point.milliseconds))

    def _run(self, run_id: str) -> Run:
        """Return the run. Raises TrackingError for an answer that is none of MLflow's."""
        run = self._client.get_run(run_id)
        known(run.info.run_id, "run")
        return run


def _birth_tags(identity: Identity) -> dict[str, str]:
    tags = {
        "rankzero.uuid": identity.uuid,
        "mlflow.source.name": identity.experiment_file or "rankzero",
        "mlflow.source.type": "LOCAL",
        "mlflow.parentRunId": identity.parent_run_id,
    }
    with contextlib.suppress(
        OSError, KeyError, ImportError
    ):  # a user id without a name, as containers have
        tags["mlflow.user"] = getpass.getuser()
    return {key: limits.head(value, limits.TAG_LENGTH) for key, value in tags.items() if value}

"""The runs of one tracking store."""

from __future__ import annotations

import contextlib
import getpass
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow.entities import Dataset, DatasetInput, InputTag, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException

from rankzero import scalars
from rankzero.errors import UserError
from rankzero.events import DataDescribed, RunEnded, RunStarted
from rankzero.mlflow_store import limits, saved_view
from rankzero.mlflow_store.client import experiments
from rankzero.mlflow_store.client.artifact_locations import ArtifactLocations
from rankzero.mlflow_store.client.connection import (
    all_found,
    chunks,
    connect,
    if_known,
    log_points,
    patience,
)
from rankzero.mlflow_store.client.deletion import MlflowDeletion
from rankzero.mlflow_store.client.images import write_images
from rankzero.mlflow_store.client.mlflow_compat import request_timeout
from rankzero.mlflow_store.client.models import MlflowModels
from rankzero.mlflow_store.client.records import RunRecord, require_id
from rankzero.mlflow_store.items import CLAIM, DESCRIPTION, MetricPoint, claim_of
from rankzero.mlflow_store.uris import NoSuchRun, RunErased, RunGone, TrackingError
from rankzero.redaction.text import url_without_secrets
from rankzero.run_store.folder import Identity
from rankzero.run_store.provenance import tags_for_mlflow, tags_of_user

# Lengths that MLflow accepts.
_DATASET_NAME, _DATASET_DIGEST, _DATASET_TAG = 500, 36, 500
# For the answer to a name, because somebody waits for the command.
_LOOK_UP_SECONDS = 4
_UUID = "rankzero.uuid"
# A server may create a run after the client gave up, and then another one of the same time.
# Only the one that is delivered to has a claim.
_NEWEST_FIRST = ["attributes.start_time DESC", f"tags.`{CLAIM}` DESC"]


class MlflowRuns:
    """The runs of one tracking store, `models`, `deletion`; not for several threads at once."""

    def __init__(self, tracking_uri: str) -> None:
        self._uri = tracking_uri
        self._client = connect(tracking_uri)
        self._locations = ArtifactLocations(self._client, tracking_uri)
        self.models = MlflowModels(self._client, self._locations)
        self.deletion = MlflowDeletion(self._client, tracking_uri, self._locations, self.models)

    def open_run(
        self, identity: Identity, start_seconds: float, experiment_id: str | None = None
    ) -> RunRecord:
        """Return the identity's run, created if need be; each call returns the same run.

        `experiment_id`: where it is, if that is known. The experiment may have another name by now.
        """
        tags = {
            _UUID: identity.uuid,
            "mlflow.source.name": identity.experiment_file or "rankzero",
            "mlflow.source.type": "LOCAL",
            "mlflow.parentRunId": identity.parent_run_id,
        }
        # MLflow takes a run's user from this tag, only now. A container's user may have no name.
        with contextlib.suppress(OSError, KeyError, ImportError):
            tags["mlflow.user"] = getpass.getuser()
        legal = {key: limits.head(one, limits.TAG_LENGTH) for key, one in tags.items() if one}
        began, name = int(start_seconds * 1000), identity.name
        if (found := self.find_open_run(identity, experiment_id)) is not None:
            return found
        where = experiments.find_or_create(self._client, self._uri, identity, experiment_id)
        # Sent again after a lost answer, it would make a second run. The next call looks first.
        with request_timeout(0, once=True):
            run = self._client.create_run(where, start_time=began, run_name=name, tags=legal)
        return RunRecord.of(run)

    def find_open_run(
        self, identity: Identity, experiment_id: str | None = None
    ) -> RunRecord | None:
        """Return the identity's run, or None if no process has created it yet."""
        if identity.mlflow_run_id is not None:
            return RunRecord.of(self._client.get_run(identity.mlflow_run_id))
        if experiment_id is None:
            experiment = self._client.get_experiment_by_name(identity.experiment)
            if experiment is None:
                return None
            experiment_id = experiment.experiment_id
        uuid = f"tags.`{_UUID}` = '{identity.uuid}'"
        return self._newest([experiment_id], uuid)

    def find_namesake(self, identity: Identity) -> RunRecord | None:
        """Return the newest other run of RankZero with this name and experiment, or None."""
        experiment = self._client.get_experiment_by_name(identity.experiment)
        if experiment is None:
            return None
        named = f"attributes.run_name = '{identity.name}'"
        others = f"{named} and tags.`{_UUID}` != '{identity.uuid}'"
        return self._newest([experiment.experiment_id], others)

    def start_attempt(self, run_id: str, event: RunStarted) -> None:
        """Set the run to RUNNING and log its params and tags.

        Keeps a note of the user that is there. Keeps all tags of the user that are there, unless a
        later attempt has others: the first one may be sent again, after somebody changed them.
        """
        tags = {**tags_for_mlflow(event.environment), "rankzero.attempt": str(event.attempt)}
        tags[CLAIM] = claim_of(event)
        if event.attempt > 1:
            tags.pop(DESCRIPTION, None)
        else:
            present = self._run(run_id).data.tags
            for key in (DESCRIPTION, *tags_of_user(tags)):
                if limits.name(key) in present:
                    tags.pop(key, None)
        run = self.log_params(run_id, event.params, tags)
        if (error := "rankzero.error") in run.data.tags:  # an earlier attempt's
            self._client.delete_tag(run_id, error)
        if run.info.status != "RUNNING":
            self._client.update_run(run_id, status="RUNNING")

    def log_params(
        self, run_id: str, params: Mapping[str, str], tags: Mapping[str, str] | None = None
    ) -> Run:
        """Log params, and with them tags. Return the run as it was."""
        run = self._run(run_id)
        # MLflow never changes a param. A later value becomes a tag.
        new, changed = limits.new_and_changed(params, run.data.params, run.data.tags)
        for chunk in chunks([Param(*pair) for pair in new.items()], limits.ITEMS_PER_BATCH):
            self._client.log_batch(run_id, params=chunk, synchronous=True)
        self.set_tags(run_id, {**(tags or {}), **changed})
        return run

    def log_data(self, run_id: str, event: DataDescribed) -> None:
        """Log a data set as the run's input. A second call changes nothing."""
        self._client.log_inputs(run_id, [_dataset_input(event)])

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Send the points. Sending one again changes nothing."""
        log_points(self._client, run_id, points)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set the tags, with names and values that MLflow accepts."""
        legal_tags = [
            RunTag(limits.name(key), limits.head(value, limits.TAG_LENGTH))
            for key, value in tags.items()
        ]
        for chunk in chunks(legal_tags, limits.ITEMS_PER_BATCH):
            self._client.log_batch(run_id, tags=chunk, synchronous=True)

    def description(self, run_id: str) -> str:
        """Return the run's description as it is in MLflow; users may edit it, too."""
        return str(self._run(run_id).data.tags.get(DESCRIPTION, ""))

    def close_run(self, run_id: str, event: RunEnded) -> None:
        """Set the run's status and end time. Raises TrackingError if it has another status then."""
        ended = scalars.milliseconds(event.time)
        self._client.set_terminated(run_id, event.status, end_time=ended)
        status = self._run(run_id).info.status
        if status != event.status:
            raise TrackingError(
                f"the run's status in MLflow is {status} after it was set to {event.status}"
            )

    def require_run(self, run_id: str) -> None:
        """Raise RunGone if the run was deleted, and whatever MLflow raises if it cannot answer."""
        run = if_known(self._run, run_id)
        if run is None:
            raise RunErased(f"MLflow has no run {run_id} any more")
        if run.info.lifecycle_stage == "deleted":
            raise RunGone(f"the MLflow run {run_id} was deleted")

    def log_artifact(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Upload a file into the run's artifacts, into `folder` there."""
        self._locations.of_run(run_id).upload_file(path, folder)

    def log_pictures(
        self, run_id: str, pictures: Mapping[str, Path], step: int, milliseconds: int
    ) -> list[str]:
        """Upload PNGs by key, so that MLflow's page shows each key's images by step.

        A second call writes the same files. Returns the artifacts ``pictures/<key>.png``, which
        have the newest of each key. Raises NeverAccepted if an image cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="rankzero-") as folder:
            newest = write_images(pictures, Path(folder), run_id, step, milliseconds)
            self._locations.of_run(run_id).upload_folder(Path(folder))
        self.set_tags(run_id, {"mlflow.loggedImages": "True"})
        return newest

    def find_run(self, name_or_id: str, experiment: str | None = None) -> RunRecord:
        """Return the run of this id, else RankZero's of this name, else another tool's.

        `experiment`: the only MLflow experiment in which a name is looked for, its newest run.
        Raises NoSuchRun. Without `experiment`, raises UserError if the name is of several runs.
        """
        try:
            return RunRecord.of(self._run(name_or_id))
        except MlflowException as error:
            # MLflow refuses what is not a run's id.
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
        named, place = self._named(name_or_id, experiment), url_without_secrets(self._uri)
        if not named:
            raise NoSuchRun(f"no run is called {name_or_id!r} in {place}")
        ours = [run for run in named if _UUID in run.tags]
        if experiment is None and len({run.tags[_UUID] for run in ours}) > 1:
            ids = " or ".join(run.run_id for run in ours)
            several = f"{place} has {len(ours)} runs called {name_or_id!r}"
            raise UserError(f"{several}: give the MLflow run id, {ids}")
        return (ours or named)[0]

    def ids_named(self, name: str, *, among_deleted: bool = False) -> list[str]:
        """Return the ids of all runs of this name. Waits seconds for each answer of a server."""
        view = ViewType.DELETED_ONLY if among_deleted else ViewType.ACTIVE_ONLY
        with request_timeout(_LOOK_UP_SECONDS, once=True, at_most=True):
            return [run.run_id for run in self._named(name, view=view)]

    def experiment_name(self, experiment_id: str) -> str:
        """Return the name of an experiment."""
        return str(self._client.get_experiment(experiment_id).name)

    def save_view(self, experiment: str, goal: str) -> str | None:
        """Save an experiment's view for its goal metric, unless a user has changed the view.

        Returns the experiment's id, or None if there is no such experiment.
        """
        found = self._client.get_experiment_by_name(experiment)
        if found is None or found.lifecycle_stage == "deleted":
            return None
        present, value = found.tags.get(saved_view.TAG), saved_view.tag_value(goal)
        if present != value and saved_view.is_ours(present):
            self._client.set_experiment_tag(found.experiment_id, saved_view.TAG, value)
        return str(found.experiment_id)

    def download_artifact(self, run_id: str, name: str, folder: Path) -> Path:
        """Download one of the run's artifacts into the folder and return its path.

        Raises TrackingError if the run has no such artifact, or if bytes are missing.
        """
        listed = self._client.list_artifacts(run_id, str(Path(name).parent).strip("."))
        size = next((found.file_size for found in listed if found.path == name), -1)
        if size == -1:
            raise TrackingError(f"the MLflow run {run_id} has no artifact {name!r}")
        with patience():
            path = Path(self._client.download_artifacts(run_id, name, str(folder)))
        # MLflow does not compare them.
        if size is not None and path.stat().st_size != size:
            raise TrackingError(
                f"{path.stat().st_size} of {size} bytes of {name!r} came from MLflow: try again"
            )
        return path

    def download_artifacts(self, run_id: str, folder: Path, below: str = "") -> None:
        """Download all of the run's artifacts, or those of one folder, into a new folder."""
        # Another place than MLflow's own could be any folder of this machine.
        self._locations.of_run(run_id)
        folder.mkdir(parents=True)
        if self._client.list_artifacts(run_id, below):
            uri = self._client.get_run(run_id).info.artifact_uri
            self._locations.download(f"{uri}/{below}".rstrip("/"), folder)

    def history(self, run_id: str, key: str) -> list[MetricPoint]:
        """Return every point of a metric, by step."""
        found = self._client.get_metric_history(run_id, key)
        points = [MetricPoint(one.key, one.value, one.timestamp, one.step) for one in found]
        return sorted(points, key=lambda point: (point.step, point.milliseconds))

    def _named(
        self, name: str, experiment: str | None = None, view: int = ViewType.ACTIVE_ONLY
    ) -> list[RunRecord]:
        known = all_found(self._client.search_experiments)
        where = [one.experiment_id for one in known if experiment in (None, one.name)]
        # There is no way to write both quotes.
        quote = "'" if "'" not in name else '"'
        condition = f"attributes.run_name = {quote}{name.replace(quote, '')}{quote}"
        found = self._client.search_runs(where, condition, view, order_by=_NEWEST_FIRST)
        return [RunRecord.of(run) for run in found if run.info.run_name == name]

    def _newest(self, experiment_ids: list[str], condition: str) -> RunRecord | None:
        runs = self._client.search_runs(
            experiment_ids, condition, max_results=1, order_by=_NEWEST_FIRST
        )
        return RunRecord.of(runs[0]) if runs else None

    def _run(self, run_id: str) -> Run:
        run = self._client.get_run(run_id)
        require_id(run.info.run_id, "run")
        return run


def _dataset_input(event: DataDescribed) -> DatasetInput:
    """Return the data set as MLflow shows and filters it."""
    source = (
        {"uri": event.source}
        if event.source_type == "local"
        else {"tags": {"mlflow.source.name": event.source}}
    )
    columns = [{"name": key, "type": kind, "required": True} for key, kind in event.columns.items()]
    dataset = Dataset(
        name=limits.head(event.name, _DATASET_NAME),
        digest=limits.head(event.digest, _DATASET_DIGEST),
        source_type=event.source_type,
        source=json.dumps(source),
        schema=json.dumps({"mlflow_colspec": columns}) if columns else None,
        profile=json.dumps({"num_rows": event.samples}),
    )
    tags = {"mlflow.data.context": event.context, "rankzero.digest_of": event.how}
    return DatasetInput(
        dataset, [InputTag(key, limits.head(value, _DATASET_TAG)) for key, value in tags.items()]
    )

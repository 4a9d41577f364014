"""Checkpoints and models: MLflow's logged models with their bytes, and its registry."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, Metric
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

from rankzero.events import CheckpointSaved
from rankzero.mlflow_store.client import mlflow_compat
from rankzero.mlflow_store.client.artifact_locations import ArtifactLocations, names
from rankzero.mlflow_store.client.connection import all_found, if_known, log_points
from rankzero.mlflow_store.client.records import RemoteCheckpoint, RunRecord
from rankzero.mlflow_store.items import MetricPoint
from rankzero.mlflow_store.uris import TrackingError
from rankzero.permanent_errors import refusal


class MlflowModels:
    """The logged models of one tracking store: checkpoints, and models that can be served."""

    def __init__(self, client: MlflowClient, locations: ArtifactLocations) -> None:
        self._client, self._locations = client, locations

    def save_checkpoint(
        self,
        run: RunRecord,
        event: CheckpointSaved,
        folder: Path,
        points: Callable[[str], Sequence[MetricPoint]],
    ) -> str:
        """Upload the checkpoint's folder as a logged model and return its id; once is enough.

        `points` returns the metrics to link to a model id. The model is READY only once all of it
        is uploaded. Deletes what an interrupted upload left.

        Raises FileNotFoundError if the folder is deleted meanwhile.
        """
        saved_at = repr(event.time)
        whole: str | None = None
        for model in self._checkpoint_models(run, event.step):
            if model.status == "READY" and model.tags.get("rankzero.saved_at") == saved_at:
                whole = whole or str(model.model_id)
            else:
                self.delete_checkpoint(model.model_id)
        if whole is None and not names(folder):
            raise FileNotFoundError(folder)
        tags = {"rankzero.step": str(event.step), "rankzero.saved_at": saved_at}
        model_id = whole or self._upload(
            run,
            folder,
            points,
            name=f"checkpoint-step-{event.step}",
            params={"step": str(event.step)},
            model_type="checkpoint",
            tags=tags | {"rankzero.best": str(event.best).lower()},
        )
        self._link_output(run, model_id, event.step)
        if event.best:
            # Also its own tag: if a journal is delivered again, an earlier best has taken it.
            for model in self._checkpoint_models(run):
                best = str(model.model_id == model_id).lower()
                if model.tags.get("rankzero.best") != best:
                    self._client.set_logged_model_tags(model.model_id, {"rankzero.best": best})
        return model_id

    def list_checkpoints(self, run: RunRecord) -> list[RemoteCheckpoint]:
        """Return the run's checkpoints by step, including interrupted uploads."""
        return sorted(map(RemoteCheckpoint.of, self._checkpoint_models(run)))

    def delete_checkpoints(self, run: RunRecord, step: int) -> None:
        """Delete the checkpoints of `step` with their bytes."""
        for model in self._checkpoint_models(run, step):
            self.delete_checkpoint(model.model_id)

    def delete_checkpoint(self, model_id: str) -> None:
        """Delete the logged model with its bytes, unless it is deleted.

        Raises NeverAccepted, and deletes nothing, if a model's bytes cannot be where MLflow says.
        """
        if (model := if_known(self._client.get_logged_model, model_id)) is None:
            return
        # MLflow's own deletion hides a model and keeps its bytes. Other uploads wait behind this.
        self._locations.of_model(model).delete(may_stay=True)
        self._client.delete_logged_model(model_id)

    def retire(self, model_id: str) -> None:
        """Delete a best model that another one replaced.

        A registered one stays, and its tag says that it is a former one: the registry's versions
        have no files of their own.
        """
        if (model := if_known(self._client.get_logged_model, model_id)) is None:
            return
        versions = self.versions({model_id, str(model.source_run_id)})
        if any(self._is_source(model, version) for version in versions):
            self._client.set_logged_model_tags(model_id, {"rankzero.model": "former"})
        else:
            self.delete_checkpoint(model_id)

    def versions(self, ids: set[str]) -> list[ModelVersion]:
        """Return the registry's versions whose run or source is one of `ids`, runs or models."""
        # A version that somebody registered may name no run, so no filter finds all.
        return [
            version
            for version in all_found(self._client.search_model_versions)
            if not ids.isdisjoint((str(version.run_id), *str(version.source).split("/")))
        ]

    def download_checkpoint(self, model_id: str, destination: Path) -> Path:
        """Download the checkpoint's files into the folder `destination` and return it."""
        destination.mkdir(parents=True, exist_ok=True)
        location = self._client.get_logged_model(model_id).artifact_location
        self._locations.download(location, destination)
        return destination

    def log_model(
        self,
        run: RunRecord,
        folder: Path,
        name: str,
        step: int,
        tags: Mapping[str, str],
        kind: str = "pytorch",
    ) -> str:
        """Upload a model that `save_pytorch` saved and return its id.

        ``mlflow.pytorch.load_model("models:/<id>")`` loads it. Deletes what an interrupted upload
        of this name left. With a tag ``rankzero.saved_at``, once is enough.
        """
        saved_at = tags.get("rankzero.saved_at")
        whole: str | None = None
        for model in self.of_run(run, kind):
            is_same = model.tags.get("rankzero.saved_at") == saved_at
            if model.name != name or not (is_same or "rankzero.model" in model.tags):
                continue
            if model.status != "READY":
                self.delete_checkpoint(model.model_id)
            elif is_same and saved_at is not None:
                whole = str(model.model_id)
        # Without metrics, MLflow's page of it is empty.
        points = functools.partial(self._points_of_checkpoint, run, step)
        model_id = whole or self._upload(
            run, folder, points, name=name, tags=dict(tags), model_type=kind
        )
        self._link_output(run, model_id, step)
        return model_id

    def best_models(self, run: RunRecord) -> dict[str, int]:
        """Return the steps of the run's logged best models by their ids, the newest last."""
        steps = {
            str(model.model_id): int(model.tags["rankzero.step"])
            for model in self.of_run(run, "pytorch")
            if model.status == "READY" and model.tags.get("rankzero.model") == "best"
        }
        return dict(sorted(steps.items(), key=lambda one: one[1]))

    def best_model(self, run: RunRecord) -> str | None:
        """Return the id of the run's newest logged best model, or None if it has none."""
        return next(reversed(self.best_models(run)), None)

    def of_run(
        self, run: RunRecord, kind: str | None = None, condition: str = ""
    ) -> list[LoggedModel]:
        """Return the logged models of a run, by default also those that other tools logged."""
        where = f"source_run_id = '{run.run_id}'{condition}"
        try:
            models = [*all_found(self._client.search_logged_models, [run.experiment_id], where)]
        except MlflowException as error:
            if error.error_code == "ENDPOINT_NOT_FOUND":  # or a proxy's answer
                mlflow_compat.refuse_old_server(self._client)
            raise
        return [model for model in models if kind in (None, model.model_type)]

    def register(self, run: RunRecord, model_id: str, name: str) -> int:
        """Make a logged model the newest version of a registered model and return the version.

        Creates the registered model if need be. A second call returns the version of the first.
        Raises TrackingError if MLflow does not accept the name.
        """
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code == "INVALID_PARAMETER_VALUE":
                raise TrackingError(
                    f"MLflow does not accept {name!r} as a registered model's name: {error}"
                ) from error
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"models:/{model_id}"
        for version in self._client.search_model_versions(f"run_id = '{run.run_id}'"):
            if (version.name, version.source) == (name, source):
                return self._registered(model_id, name, int(version.version))
        # Sent again after a lost answer, it would make a second version. MLflow has an engine for
        # each URI, and the client's has settings for a lost database.
        with (
            mlflow_compat.request_timeout(0, once=True),
            mlflow_compat.global_tracking_uri(str(self._client.tracking_uri)),
        ):
            made = self._client.create_model_version(name, source, run.run_id, model_id=model_id)
        return self._registered(model_id, name, int(made.version))

    def _registered(self, model_id: str, name: str, version: int) -> int:
        # MLflow's page of a model reads this tag. A server has set it, a database has not.
        tags = self._client.get_logged_model(model_id).tags
        known = json.loads(tags.get(MLFLOW_MODEL_VERSIONS, "[]"))
        new = {"name": name, "version": version}
        if new not in known:
            value = json.dumps([*known, new])
            self._client.set_logged_model_tags(model_id, {MLFLOW_MODEL_VERSIONS: value})
        return version

    def _is_source(self, model: LoggedModel, version: ModelVersion) -> bool:
        if model.model_id in str(version.source).split("/"):
            return True
        # The source of a copied version is another version, which may be deleted.
        name, number = version.name, version.version
        place = self._client.get_model_version_download_uri(name, number)
        return bool(place == model.artifact_location)

    def _checkpoint_models(self, run: RunRecord, step: int | None = None) -> list[LoggedModel]:
        condition = "" if step is None else f" AND tags.`rankzero.step` = '{step}'"
        return self.of_run(run, "checkpoint", condition)

    def _upload(
        self,
        run: RunRecord,
        folder: Path,
        points: Callable[[str], Sequence[MetricPoint]],
        **fields: Any,
    ) -> str:
        """Upload a folder as a new logged model and return its id."""
        files = names(folder)
        # Sent again after a lost answer, it would make a second model. The next call looks first.
        with mlflow_compat.request_timeout(0, once=True):
            model = self._client.create_logged_model(
                run.experiment_id, source_run_id=run.run_id, **fields
            )
        try:
            self._locations.of_model(model).upload_folder(folder)
            # Retention may have deleted files during the upload.
            if names(folder) != files:
                raise FileNotFoundError(folder)
        except Exception as error:
            # No other try would find what is left.
            if isinstance(error, FileNotFoundError) or refusal(error) is not None:
                self.delete_checkpoint(model.model_id)
            raise
        log_points(self._client, run.run_id, points(model.model_id))
        self._client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _points_of_checkpoint(self, run: RunRecord, step: int, model_id: str) -> list[MetricPoint]:
        # As the same points, for another model.
        return [
            MetricPoint(one.key, one.value, one.timestamp, one.step, model_id)
            for checkpoint in self._checkpoint_models(run, step)[:1]
            for one in checkpoint.metrics or ()
            if one.run_id == run.run_id and (one.value or self._is_zero(one))
        ]

    def _is_zero(self, metric: Metric) -> bool:
        # MLflow keeps a NaN of a model as 0, and that of its run as NaN.
        found = self._client.get_metric_history(str(metric.run_id), metric.key)
        place = (0.0, metric.timestamp, metric.step)
        return any((one.value, one.timestamp, one.step) == place for one in found)

    def _link_output(self, run: RunRecord, model_id: str, step: int) -> None:
        outputs = self._client.get_run(run.run_id).outputs
        linked = outputs.model_outputs if outputs else ()
        if not any(output.model_id == model_id for output in linked):
            self._client.log_outputs(run.run_id, [LoggedModelOutput(model_id, step)])

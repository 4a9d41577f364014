"""Checkpoints and models: MLflow's logged models, with their bytes, and its registry."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.exceptions import MlflowException

from rankzero.events import CheckpointSaved
from rankzero.mlflow_store.client.artifact_locations import ArtifactLocations, names
from rankzero.mlflow_store.client.connection import as_everybodys, log_points, patience
from rankzero.mlflow_store.client.records import OpenRun, RemoteCheckpoint, checkpoint
from rankzero.mlflow_store.items import MetricPoint
from rankzero.mlflow_store.uris import TrackingError


class MlflowModels:
    """The logged models of one tracking store: those of kind checkpoint, and those that can be served."""

    def __init__(self, client: MlflowClient, tracking_uri: str, places: ArtifactLocations) -> None:
        self._client, self._uri, self._places = client, tracking_uri, places

    def save_checkpoint(
        self,
        run: OpenRun,
        event: CheckpointSaved,
        folder: Path,
        points: Callable[[str], Sequence[MetricPoint]],
    ) -> str:
        """Upload the checkpoint's folder as a logged model and return its id; again: nothing happens.

        `points` gives the metrics to link to the model. The model is READY only when all of it is there;
        what an upload that was cut short has left is deleted. Raises FileNotFoundError when the folder goes meanwhile.
        """
        saved_at = repr(event.time)
        models = self._checkpoint_models(run, event.step)
        whole = [
            m for m in models if m.status == "READY" and m.tags.get("rankzero.saved_at") == saved_at
        ]
        for model in models:
            if model not in whole:
                self.delete_checkpoint(model.model_id)
        model_id = (
            whole[0].model_id if whole else self._upload_checkpoint(run, event, folder, points)
        )
        self._link_output(run, model_id, event.step)
        if event.best:
            self._unmark_best(run, but=model_id)
        return model_id

    def list_checkpoints(self, run: OpenRun) -> list[RemoteCheckpoint]:
        """Return the run's checkpoints by step, those whose upload was cut short included."""
        return sorted(map(checkpoint, self._checkpoint_models(run)))

    def delete_checkpoints(self, run: OpenRun, step: int) -> None:
        """Delete the checkpoints of `step`, bytes included."""
        for model in self._checkpoint_models(run, step):
            self.delete_checkpoint(model.model_id)

    def delete_checkpoint(self, model_id: str) -> None:
        """Delete the logged model, bytes included. MLflow alone would only hide it and keep the bytes.

        Raises Impossible, and deletes nothing, where MLflow answers that they lie where a model's do not.
        """
        place = self._places.of_model(self._client.get_logged_model(model_id))
        with patience():
            place.delete()
        self._client.delete_logged_model(model_id)

    def download_checkpoint(self, model_id: str, destination: Path) -> Path:
        """Download the checkpoint's files into the folder `destination`, made if need be, and return it."""
        destination.mkdir(parents=True, exist_ok=True)
        location = self._client.get_logged_model(model_id).artifact_location
        with patience():
            self._places.repository(location).download_artifacts("", str(destination))
        return destination

    def log_model(
        self, run: OpenRun, folder: Path, name: str, step: int, tags: Mapping[str, str]
    ) -> str:
        """Upload a model saved with `save_pytorch` for ``mlflow.pytorch.load_model("models:/<id>")``; return its id.

        What an upload of this name that was cut short has left is deleted.
        """
        for left in self._models(run, "pytorch"):
            if left.name == name and left.status != "READY":
                self.delete_checkpoint(left.model_id)
        model = self._client.create_logged_model(
            run.experiment_id,
            name=name,
            source_run_id=run.run_id,
            tags=dict(tags),
            model_type="pytorch",
        )
        self._upload(model, folder)
        self._client.finalize_logged_model(model.model_id, "READY")
        self._link_output(run, model.model_id, step)
        return model.model_id

    def best_model(self, run: OpenRun) -> str | None:
        """Return the id of the run's logged best model; None where it has none, or only what a cut upload has left."""
        whole = [model for model in self._models(run, "pytorch") if model.status == "READY"]
        models = [model for model in whole if model.tags.get("rankzero.model") == "best"]
        return (
            str(max(models, key=lambda model: int(model.tags["rankzero.step"])).model_id)
            if models
            else None
        )

    def register(self, run: OpenRun, model_id: str, name: str) -> int:
        """Make a logged model the newest version of a registered model, made if need be; return the version.

        Again: the version that it is already. Raises TrackingError for a name that MLflow does not take.
        """
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code == "INVALID_PARAMETER_VALUE":
                raise TrackingError(
                    f"MLflow does not take {name!r} for a registered model: {error}"
                ) from error
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        known = self._client.search_model_versions(f"run_id = '{run.run_id}'")
        same = next(
            (
                found
                for found in known
                if (found.name, found.source) == (name, f"models:/{model_id}")
            ),
            None,
        )
        with as_everybodys(
            self._uri
        ):  # MLflow's registry looks the model up by a client of its own
            made = same or self._client.create_model_version(
                name, f"models:/{model_id}", run.run_id, model_id=model_id
            )
        return int(made.version)

    def _checkpoint_models(self, run: OpenRun, step: int | None = None) -> list[LoggedModel]:
        return self._models(
            run, "checkpoint", "" if step is None else f" AND tags.`rankzero.step` = '{step}'"
        )

    def _models(self, run: OpenRun, kind: str, further: str = "") -> list[LoggedModel]:
        condition = f"source_run_id = '{run.run_id}'{further}"
        found: list[LoggedModel] = []
        token: str | None = None
        while True:
            page = self._client.search_logged_models(
                [run.experiment_id], condition, page_token=token
            )
            found += (model for model in page if model.model_type == kind)
            token = page.token
            if not token:
                return found

    def _upload_checkpoint(
        self,
        run: OpenRun,
        event: CheckpointSaved,
        folder: Path,
        points: Callable[[str], Sequence[MetricPoint]],
    ) -> str:
        files = names(folder)
        if not files:
            raise FileNotFoundError(folder)
        model = self._client.create_logged_model(
            run.experiment_id,
            name=f"checkpoint-step-{event.step}",
            source_run_id=run.run_id,
            params={"step": str(event.step)},
            model_type="checkpoint",
            tags={
                "rankzero.step": str(event.step),
                "rankzero.best": str(event.best).lower(),
                "rankzero.saved_at": repr(event.time),
            },
        )
        self._upload(model, folder)
        if names(folder) != files:  # retention was faster than the upload
            self.delete_checkpoint(model.model_id)
            raise FileNotFoundError(folder)
        log_points(self._client, run.run_id, points(model.model_id))
        self._client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _upload(self, model: LoggedModel, folder: Path) -> None:
        place = self._places.of_model(model)
        if place.folder is not None:
            place.refuse_links(names(folder))
            shutil.copytree(folder, place.folder, copy_function=_link_or_copy, dirs_exist_ok=True)
        else:
            with patience(folder):
                place.upload_folder(folder)

    def _link_output(self, run: OpenRun, model_id: str, step: int) -> None:
        outputs = self._client.get_run(run.run_id).outputs
        if not any(
            output.model_id == model_id for output in (outputs.model_outputs if outputs else ())
        ):
            self._client.log_outputs(run.run_id, [LoggedModelOutput(model_id, step)])

    def _unmark_best(self, run: OpenRun, but: str) -> None:
        for model in self._checkpoint_models(run):
            if model.model_id != but and model.tags.get("rankzero.best") == "true":
                self._client.set_logged_model_tags(model.model_id, {"rankzero.best": "false"})


def _link_or_copy(source: str, target: str) -> None:
    """Give the file a second name where the file system can: at once, and without its bytes a second time.

    A checkpoint's files are never written to again, so what retention removes of the run's folder stays here.
    """
    with contextlib.suppress(FileNotFoundError):
        Path(target).unlink()
    try:
        Path(target).hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)

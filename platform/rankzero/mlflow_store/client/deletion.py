"""Delete runs, bring them back, and erase them with their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import ViewType

from rankzero.mlflow_store import uris
from rankzero.mlflow_store.client import mlflow_compat
from rankzero.mlflow_store.client.artifact_locations import ArtifactLocations
from rankzero.mlflow_store.client.connection import all_found, if_known
from rankzero.mlflow_store.client.experiments import restore_command
from rankzero.mlflow_store.client.models import MlflowModels
from rankzero.mlflow_store.client.records import RunRecord


class MlflowDeletion:
    """The deletion of one tracking store's runs."""

    def __init__(
        self, client: MlflowClient, uri: str, locations: ArtifactLocations, models: MlflowModels
    ) -> None:
        self._client, self._locations, self._models = client, locations, models
        self._uri = uri
        self.is_local = uris.sqlite_path(uri) is not None
        """Whether runs can be erased from here: from a server, only its administrator can."""

    def deleted(self) -> set[str]:
        """Return the ids of all runs that are deleted and can be restored."""
        experiments = all_found(self._client.search_experiments, view_type=ViewType.ALL)
        ids = [experiment.experiment_id for experiment in experiments]
        kind = ViewType.DELETED_ONLY
        runs = all_found(self._client.search_runs, ids, run_view_type=kind) if ids else ()
        return {str(run.info.run_id) for run in runs}

    def delete(self, run_id: str) -> None:
        """Delete a run until `restore`. A run that is deleted or gone stays so."""
        if self.is_active(run_id):
            self._client.delete_run(run_id)

    def restore(self, run_id: str) -> bool:
        """Bring a deleted run back. Return False if it is gone.

        Raises ExperimentGone if its experiment is deleted.
        """
        run = self.record(run_id, among_deleted=True)
        if run is None:
            return False
        # Nobody sees the runs of a deleted experiment.
        experiment = self._client.get_experiment(run.experiment_id)
        if experiment.lifecycle_stage == "deleted":
            # It would bring back other runs, too, which somebody may have deleted on purpose.
            command = restore_command(self._uri, experiment.experiment_id)
            raise uris.ExperimentGone(
                f"the MLflow experiment {experiment.name!r} was deleted; this brings back all of "
                f"its runs: {command}"
            )
        self._client.restore_run(run_id)
        return True

    def registered(self, run_ids: Sequence[str]) -> list[str]:
        """Return the versions in the model registry that these runs' files are the source of."""
        found = [self.record(run_id, among_deleted=True) for run_id in run_ids]
        models = [model for run in found if run for model in self._models.of_run(run)]
        ids = {*run_ids, *(model.model_id for model in models)}
        return [f"{one.name}/{one.version}" for one in self._models.versions(ids)]

    def places(self, run_id: str) -> list[Path]:
        """Return the folders of this machine that have the files of a run and its models."""
        run = self.record(run_id, among_deleted=True)
        if run is None:
            return []
        models = map(self._locations.of_model, self._models.of_run(run))
        found = (one.folder for one in (self._locations.of_run(run_id), *models))
        return [folder for folder in found if folder is not None]

    def erase(self, run_id: str) -> None:
        """Erase a deleted run of a local database with its models and all their files.

        A second call continues what a killed one began.
        """
        run = self.record(run_id, among_deleted=True)
        if run is None:
            return
        for model in mlflow_compat.models_of(self._client, run_id):
            self._locations.of_model(model).delete()
            mlflow_compat.erase(self._client, model_id=model.model_id)
        self._locations.of_run(run_id).delete()
        mlflow_compat.erase(self._client, run_id=run_id)

    def is_active(self, run_id: str) -> bool:
        """Return whether the run is there and not deleted."""
        return self.record(run_id) is not None

    def record(self, run_id: str, *, among_deleted: bool = False) -> RunRecord | None:
        """Return the run, or None if it is gone or, unless `among_deleted`, deleted."""
        run = if_known(self._client.get_run, run_id)
        if run is None or not (among_deleted or run.info.lifecycle_stage == "active"):
            return None
        return RunRecord.of(run)

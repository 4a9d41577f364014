"""Where the files of runs and logged models lie, as MLflow answers; on this machine, only where MLflow puts such files.

A server, or a database that came with somebody's run, can answer with any folder: nobody's files are to be written
over, or deleted with a checkpoint, for an answer.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils import file_utils, uri

from rankzero.faults import NeverAccepted
from rankzero.mlflow_store.client.records import known

RUN_ID, MODEL_ID = re.compile(r"[0-9a-f]{32}"), re.compile(r"m-[0-9a-f]{32}")
MODELS, ARTIFACTS = "models", "artifacts"
ASKED_AGAIN = (
    "runs",
    "models",
)  # schemes for which MLflow asks the server where that is, and takes any answer
ELSEWHERE = "; nothing is written or deleted there: put right what MLflow has for it, or use another tracking store"

_file_utils: Any = file_utils
_uri: Any = uri


class ArtifactLocation:
    """The files of one run or logged model; `folder`: where they are on this machine, None for a place elsewhere."""

    def __init__(self, repository: Any, folder: Path | None) -> None:
        self.repository, self.folder = repository, folder

    def upload_file(self, path: Path, below: str | None = None) -> None:
        """Upload a file, into the folder `below` there. Raises Impossible where that leads through a link."""
        self.refuse_links([f"{below or '.'}/{path.name}"])
        self.repository.log_artifact(str(path), below)

    def upload_folder(self, path: Path, below: str | None = None) -> None:
        """Upload what is in a folder. Raises Impossible where that leads through a link."""
        self.refuse_links(f"{below or '.'}/{name}" for name in names(path))
        self.repository.log_artifacts(str(path), below)

    def delete(self) -> None:
        """Delete all of the files."""
        if self.folder is None:
            self.repository.delete_artifacts()
        elif (
            self.folder.exists()
        ):  # by ourselves: MLflow unquotes the path twice, and deletes another folder then
            shutil.rmtree(self.folder)

    def refuse_links(self, written: Iterable[str]) -> None:
        """Raise Impossible where a link lies between the folder and something that is to be written below it."""
        if self.folder is None:
            return
        base = self.folder.resolve()
        for name in written:
            if (base / name).resolve() != base / name:
                raise NeverAccepted(
                    f"{self.folder / name} leads out of MLflow's artifacts, by a link; take it away"
                )


class ArtifactLocations:
    """The places of one tracking store's runs and models."""

    def __init__(self, client: MlflowClient, tracking_uri: str) -> None:
        self._client, self._uri = client, tracking_uri
        self._runs: dict[str, ArtifactLocation] = {}

    def of_run(self, run_id: str) -> ArtifactLocation:
        """Return where a run's artifacts lie, asked for once. Raises Impossible where a run's artifacts cannot be."""
        if run_id not in self._runs:
            info = self._client.get_run(run_id).info
            known(info.run_id, "run")
            below = (run_id,) if RUN_ID.fullmatch(run_id) else None
            self._runs[run_id] = self._place(info.artifact_uri, info.experiment_id, below)
        return self._runs[run_id]

    def of_model(self, model: LoggedModel) -> ArtifactLocation:
        """Return where a logged model's files lie. Raises Impossible where a model's files cannot be."""
        model_id = known(model.model_id, "logged model")
        below = (MODELS, model_id) if MODEL_ID.fullmatch(model_id) else None
        return self._place(model.artifact_location, model.experiment_id, below)

    def repository(self, location: str) -> Any:
        """Return what MLflow reads and writes a location with."""
        location = _uri.add_databricks_profile_info_to_artifact_uri(location, self._uri)
        return get_artifact_repository(location, tracking_uri=self._uri)

    def _place(
        self, location: str | None, experiment_id: str, below: tuple[str, ...] | None
    ) -> ArtifactLocation:
        location = location or ""
        folder = _on_this_machine(location)
        if folder is not None:
            base = _on_this_machine(
                self._client.get_experiment(experiment_id).artifact_location or ""
            )
            _require_usual(folder, base, below)
        return ArtifactLocation(self.repository(location), folder)


def names(folder: Path) -> set[str]:
    """Return what lies below a folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _on_this_machine(location: str) -> Path | None:
    """Return the folder that MLflow takes the location for; None where it is elsewhere."""
    scheme = _uri.get_uri_scheme(location)
    if scheme in ASKED_AGAIN or "\x00" in location:
        raise NeverAccepted(
            f"MLflow answers that files lie at {location!r}, which is no place for them{ELSEWHERE}"
        )
    return (
        Path(_file_utils.local_file_uri_to_path(location)).absolute()
        if scheme in ("", "file")
        else None
    )


def _require_usual(folder: Path, base: Path | None, below: tuple[str, ...] | None) -> None:
    """Raise Impossible unless the folder is MLflow's for this run or model, links followed, in the experiment's."""
    if base is not None and below is not None:
        real, tail = folder.resolve(), (*below, ARTIFACTS)
        usual = folder.parts[-len(tail) :] == real.parts[-len(tail) :] == tail
        if usual and real.is_relative_to(base.resolve()) and not folder.is_symlink():
            return
    raise NeverAccepted(
        f"MLflow answers that files lie in {str(folder)!r} on this machine{ELSEWHERE}; it is not "
        f".../{'/'.join((*(below or ('<id>',)), ARTIFACTS))} in the folder of the experiment, {str(base)!r}"
    )

"""Artifact locations: on this machine, only those that MLflow itself chooses.

MLflow answers with any folder that its database names, and the database may be somebody else's.
No file of a user may be overwritten, or deleted with a checkpoint, because of an answer.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository

from rankzero.mlflow_store.client import mlflow_compat
from rankzero.mlflow_store.client.connection import patience
from rankzero.mlflow_store.client.records import require_id
from rankzero.permanent_errors import NeverAccepted
from rankzero.redaction.text import text_without_secrets
from rankzero.run_store import disk

log = logging.getLogger("rankzero.recorder")
_RUN_ID, _MODEL_ID = re.compile(r"[0-9a-f]{32}"), re.compile(r"m-[0-9a-f]{32}")
_CHANGED = re.compile("[#?]|%[0-9A-Fa-f]{2}")
_MODELS, _ARTIFACTS = "models", "artifacts"
# Schemes for which MLflow asks the server for the place, and takes any answer.
_RESOLVED_BY_SERVER = ("runs", "models")
_REFUSED = (
    "; nothing is written or deleted there: correct the location in MLflow, "
    "or use another tracking store"
)


class _ArtifactLocation:
    """The files of one run or logged model.

    `folder`: where they are on this machine, or None if they are elsewhere. `top`: the highest of
    the folders above that may be new. An upload to this machine is on its disk at the return.
    """

    def __init__(self, repository: Any, folder: Path | None, top: Path | None = None) -> None:
        self._repository, self.folder = repository, folder
        self._top = top

    def upload_file(self, path: Path, below: str | None = None) -> None:
        """Upload a file into the folder `below`. Raises NeverAccepted if a link leads elsewhere."""
        name = f"{below or '.'}/{path.name}"
        self._refuse_links([name])
        # MLflow's client does not quote a name, so the server would keep the file as another one.
        if isinstance(self._repository, HttpArtifactRepository) and _CHANGED.search(name):
            raise NeverAccepted("a server cannot get a name with #, ? or % and two hex digits")
        with patience(path):
            self._repository.log_artifact(str(path), below)
        self._confirm([name])

    def upload_folder(self, path: Path) -> None:
        """Upload a folder's content. Raises NeverAccepted if a link leads elsewhere."""
        self._refuse_links(names(path))
        if self.folder is not None:
            _copy_into(path, self.folder)
            self._confirm(names(path))
            return
        with patience(path):
            self._repository.log_artifacts(str(path))

    def delete(self, *, may_stay: bool = False) -> None:
        """Delete all of the files. `may_stay`: they stay if their place answers and forbids it."""
        if self.folder is None:
            with patience():
                self._delete_elsewhere(may_stay=may_stay)
        elif self.folder.exists():
            # Not by MLflow, which unquotes the path twice and then deletes another folder.
            shutil.rmtree(self.folder)

    def _delete_elsewhere(self, *, may_stay: bool) -> None:
        try:
            self._repository.delete_artifacts()
        except NotImplementedError:  # as Azure's Data Lake
            pass
        except Exception:
            # Azure's blobs are an error if none is there. Otherwise the place answers again.
            if not self._repository.list_artifacts():
                return
            try:
                self._repository.delete_artifacts()
            except Exception as error:
                # A bucket may forbid it, for good.
                if not may_stay:
                    raise
                place = self._repository.artifact_uri
                log.warning("deleted files stay: %s", text_without_secrets(f"{place}: {error}"))

    def _confirm(self, written: Iterable[str]) -> None:
        """Return once this machine's disk has the files. Raises OSError if it fails or is full."""
        # A picture's source is deleted, and delivery.json is synced, once the upload returns.
        if self.folder is None or self._top is None:
            return
        disk.sync_all([self.folder / name for name in written], self._top)
        # The folders above have their names for good.
        self._top = self.folder

    def _refuse_links(self, written: Iterable[str]) -> None:
        """Raise NeverAccepted if a link leads one of the paths `written` out of the folder."""
        if self.folder is None:
            return
        base = self.folder.resolve()
        for name in written:
            if (base / name).resolve() != base / name:
                raise NeverAccepted(
                    f"{self.folder / name} leads out of MLflow's artifacts by a link: remove it"
                )


class ArtifactLocations:
    """The artifact locations of one tracking store's runs and models."""

    def __init__(self, client: MlflowClient, tracking_uri: str) -> None:
        self._client, self._uri = client, tracking_uri
        self._runs: dict[str, _ArtifactLocation] = {}

    def of_run(self, run_id: str) -> _ArtifactLocation:
        """Return the location of a run's artifacts. Raises NeverAccepted if none can be there."""
        if run_id not in self._runs:
            info = self._client.get_run(run_id).info
            require_id(info.run_id, "run")
            below = (run_id,) if _RUN_ID.fullmatch(run_id) else None
            self._runs[run_id] = self._checked(info.artifact_uri, info.experiment_id, below)
        return self._runs[run_id]

    def of_model(self, model: LoggedModel) -> _ArtifactLocation:
        """Return the location of a logged model. Raises NeverAccepted if none can be there."""
        model_id = require_id(model.model_id, "logged model")
        below = (_MODELS, model_id) if _MODEL_ID.fullmatch(model_id) else None
        return self._checked(model.artifact_location, model.experiment_id, below)

    def download(self, location: str, destination: Path) -> None:
        """Download all files of a location into the folder `destination`."""
        with patience():
            repository = mlflow_compat.artifact_repository(location, self._uri)
            repository.download_artifacts("", str(destination))

    def _checked(
        self, location: str | None, experiment_id: str, below: tuple[str, ...] | None
    ) -> _ArtifactLocation:
        location = location or ""
        folder, top = _local_folder(location), None
        if folder is not None:
            experiment = self._client.get_experiment(experiment_id)
            base = _local_folder(experiment.artifact_location or "")
            _require_usual(folder, base, below)
            # The first upload creates the experiment's folder, and the store's of artifacts.
            top = folder.parents[: len(below or ()) + 3][-1]
        repository = mlflow_compat.artifact_repository(location, self._uri)
        return _ArtifactLocation(repository, folder, top)


def names(folder: Path) -> set[str]:
    """Return the paths of all files and folders below a folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _copy_into(source: Path, target: Path) -> None:
    """Copy the content of a folder. Raises the first OSError."""
    # `shutil.copytree` would give the target the source's mode, and hide an error's number.
    paths = sorted(source.iterdir())  # before the target is made: retention may have deleted it
    target.mkdir(parents=True, exist_ok=True)
    for path in paths:
        if path.is_dir():
            _copy_into(path, target / path.name)
        else:
            # A hard link takes no time and no second copy of the bytes. An uploaded folder's files
            # are never written to again, and what retention deletes in the run's folder stays here.
            with contextlib.suppress(FileNotFoundError):
                (target / path.name).unlink()
            try:
                (target / path.name).hardlink_to(path)
            except FileNotFoundError:
                raise
            except OSError:
                shutil.copy2(path, target / path.name)


def _local_folder(location: str) -> Path | None:
    scheme = mlflow_compat.scheme_of(location)
    if scheme in _RESOLVED_BY_SERVER or "\x00" in location:
        raise NeverAccepted(
            f"MLflow answers that files lie at {location!r}, which is no place for them{_REFUSED}"
        )
    return mlflow_compat.local_path(location) if scheme in ("", "file") else None


def _require_usual(folder: Path, base: Path | None, below: tuple[str, ...] | None) -> None:
    """Raise NeverAccepted unless the folder is where MLflow puts the files of this run or model.

    That is ``<below>/artifacts`` in the experiment's folder `base`, also after links.
    """
    if base is not None and below is not None:
        real, tail = folder.resolve(), (*below, _ARTIFACTS)
        usual = folder.parts[-len(tail) :] == real.parts[-len(tail) :] == tail
        if usual and real.is_relative_to(base.resolve()) and not folder.is_symlink():
            return
    raise NeverAccepted(
        f"MLflow answers that files lie in {str(folder)!r} on this machine{_REFUSED}; it is not "
        f".../{'/'.join((*(below or ('<id>',)), _ARTIFACTS))} in the folder of the experiment, "
        f"{str(base)!r}"
    )

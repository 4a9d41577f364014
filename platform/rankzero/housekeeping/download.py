"""Makes a run's folder from what MLflow has: settings, newest checkpoint. Executes nothing."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rankzero.catalog.lookup import find, mlflow_id
from rankzero.errors import UserError
from rankzero.mlflow_store.uris import TrackingError, artifact_root
from rankzero.redaction.text import line_without_secrets
from rankzero.run_store import checkpoint_files, names
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.location import make_root, may_be_foreign

if TYPE_CHECKING:
    from rankzero.mlflow_store.client import MlflowRuns, RunRecord
    from rankzero.mlflow_store.client.records import RemoteCheckpoint


def run_folder(runs: Path, tracking_uri: str, name_or_id: str) -> RunFolder:
    """Return the folder of a run that MLflow knows, made if it is not on this disk.

    Raises TrackingError, UserError.
    """
    # All of mlflow, unlike `open_run.connect`: the command then loads the user's file.
    from rankzero.mlflow_store.client import MlflowRuns

    tracker = MlflowRuns(tracking_uri)
    found = tracker.find_run(name_or_id)
    if "rankzero.uuid" not in found.tags:
        raise UserError(f"{name_or_id} was not made by rankzero: it cannot be resumed")
    # A run that was renamed on a server is still in the folder of its first name.
    here = find(runs, found.run_id)
    if here is not None and here.config.exists():
        return here
    identity = Identity(
        name=_free(runs, names.made_plain(found.name or ""), found.run_id),
        uuid=found.tags["rankzero.uuid"],
        experiment=tracker.experiment_name(found.experiment_id),
        tracking_uri=tracking_uri,
        artifact_root=artifact_root(tracking_uri),
        experiment_file=file_here(found.tags.get("rankzero.experiment_file"), runs.parent),
        project_dir=str(Path.cwd()),
        mlflow_run_id=found.run_id,
    )
    make_root(runs.parent)
    # First: if it does not come, there must be no folder that a second try would find.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=runs.parent) as temporary:
        settings = tracker.download_artifact(found.run_id, "config.yaml", Path(temporary))
        require_plain_files(Path(temporary))
        folder = RunFolder.open_or_create(runs, identity)
        shutil.move(settings, folder.config)
    return folder


def _free(runs: Path, name: str, run_id: str) -> str:
    """Return the name for the run's folder, with the run's id if another run has the name."""
    taken = RunFolder(runs / name)
    with contextlib.suppress(UserError):
        if taken.identity.mlflow_run_id == run_id:
            return name
    return f"{name}-{names.made_plain(run_id)[:8]}" if taken.path.exists() else name


def require_plain_files(folder: Path) -> None:
    """Raise TrackingError for a link below the folder: its target does not belong to the run."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise TrackingError(f"{path.name!r} from MLflow is not a plain file: it is not used")


def newest_checkpoint(
    folder: RunFolder, run: RunRecord | None = None, after: float = -math.inf
) -> tuple[Path | None, list[str]]:
    """Download the newest intact checkpoint that MLflow has of `run`, by default the folder's.

    The best one comes, too: the resumed run must not take a worse one for its best. Return the
    newest one's folder, or None, and the problems of others. It replaces a local checkpoint of
    the same step. Only steps after `after` count. Raises if MLflow cannot be reached, because an
    older one would cost steps.
    """
    from rankzero.mlflow_store.client import MlflowRuns

    tracker = MlflowRuns(folder.identity.tracking_uri)
    if run is None:
        run_id = mlflow_id(folder)
        if run_id is None:
            return None, []
        run = tracker.find_run(run_id)
    known = tracker.models.list_checkpoints(run)
    ready = [one for one in known if one.status == "READY" and one.step > after]
    # Before the newest: with that one here, nothing would be looked for in MLflow again.
    best = [one for one in known if one.best and one.status == "READY"][-1:] if ready else []
    problems = [
        text for one in best if one != ready[-1] and (text := _fetch_best(tracker, folder, one))
    ]
    for one in reversed(ready):
        problem = _fetch(tracker, folder, one)
        if problem is None:
            return checkpoint_files.folder_of(folder.checkpoints, one.step), problems
        problems.append(problem)
    return None, list(dict.fromkeys(problems))


def _fetch_best(tracker: MlflowRuns, folder: RunFolder, one: RemoteCheckpoint) -> str | None:
    """Download a checkpoint that the run can do without, unless it is here; return the problem."""
    target = checkpoint_files.folder_of(folder.checkpoints, one.step)
    if checkpoint_files.problem_with(target) is None:
        return None
    try:
        return _fetch(tracker, folder, one)
    except Exception as error:  # of MLflow, the network, the disk
        # Its first part may fill the disk, and the newest one needs the room.
        shutil.rmtree(checkpoint_files.temporary_folder(target), ignore_errors=True)
        why = line_without_secrets(f"{type(error).__name__}: {error}")
        return f"the best checkpoint, of step {one.step}, does not come from MLflow: {why}"


def _fetch(tracker: MlflowRuns, folder: RunFolder, one: RemoteCheckpoint) -> str | None:
    """Download a checkpoint into its folder; return why it is not used, or None if it is."""
    target = checkpoint_files.folder_of(folder.checkpoints, one.step)
    aside = checkpoint_files.temporary_folder(target)
    tracker.models.download_checkpoint(one.model_id, aside)
    try:
        require_plain_files(aside)
        problem = checkpoint_files.problem_with(aside)
    except TrackingError as error:
        problem = str(error)
    if problem is None:
        (aside / checkpoint_files.DOWNLOADED).touch()
        checkpoint_files.replace(aside, target)
        return None
    shutil.rmtree(aside, ignore_errors=True)
    return f"the checkpoint of step {one.step} that MLflow has is not used: {problem}"


def file_here(recorded: str | None, store: Path) -> str | None:
    """Return the experiment's file in the current folder, or None for one outside of it."""
    if recorded is None:
        return None
    # The path was recorded relative to the folder in which the run was started. Anyone who writes
    # to MLflow could name any file, so it must not be one of a run either.
    path = (Path.cwd() / recorded).resolve()
    below = path.is_relative_to(Path.cwd().resolve()) and not may_be_foreign(path, store)
    return str(Path.cwd() / recorded) if below else None

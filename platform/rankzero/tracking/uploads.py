"""Uploads of a run: its artifacts, its checkpoints as logged models. Each may be done twice with the same result."""

from __future__ import annotations

import contextlib
import itertools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rankzero import scalars
from rankzero.config.renamed import with_new_names
from rankzero.events import CheckpointDeleted, CheckpointSaved, PicturesTaken, RunStarted, decode
from rankzero.faults import is_want, refusal
from rankzero.run_store.delivery_state import ARTIFACTS, FIGURES, WORDS, DeliveryState
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.tracking.translate import linked

if TYPE_CHECKING:
    from rankzero.mlflow_store.client import MlflowRuns, OpenRun

log = logging.getLogger("rankzero.recorder")


def upload(tracker: MlflowRuns, run: OpenRun, folder: RunFolder, progress: DeliveryState) -> None:
    """Do what stands first in `progress.waiting`. Raises whatever MLflow or the file system raise."""
    word = progress.waiting[0]
    if word == ARTIFACTS:
        upload_artifacts(tracker, run, folder, progress)
        return
    if word == FIGURES:
        upload_figures(tracker, run, folder, progress)
        return
    event = decode(word)
    if isinstance(event, CheckpointDeleted):
        tracker.models.delete_checkpoints(run, event.step)
    elif isinstance(event, CheckpointSaved) and not _deleted_later(event, progress):
        path = folder.path / event.path
        if leads_out(path, folder.checkpoints):
            progress.reject(
                f"checkpoint of step {event.step}", f"{event.path!r} leads out of the run's folder"
            )
        else:
            _upload_checkpoint(tracker, run, path, event, progress)
    elif isinstance(event, PicturesTaken):
        path = folder.path / event.path
        if leads_out(path, folder.pictures):
            progress.reject(
                f"pictures of step {event.step}", f"{event.path!r} leads out of the run's folder"
            )
        else:
            _upload_pictures(tracker, run, path, event, progress)


def upload_artifacts(
    tracker: MlflowRuns, run: OpenRun, folder: RunFolder, progress: DeliveryState
) -> None:
    """Upload the files of the artifacts folder that are new or changed since the last time, and word of failures."""
    for path, parent in _artifacts(folder):
        name = str(path.relative_to(folder.path))
        if leads_out(path, folder.path / path.relative_to(folder.path).parts[0]):
            progress.reject_once(f"artifact {name}", "it leads out of the run's folder")
            continue
        stat = path.stat()
        signature = f"{stat.st_size}:{stat.st_mtime_ns}"
        if progress.uploaded.get(name) == signature:
            continue
        try:
            tracker.log_artifact(run.run_id, path, parent)
        except Exception as error:
            reason = refusal(error)
            if reason is None:
                raise
            progress.reject(f"artifact {name}", reason)
        progress.uploaded[name] = signature


def upload_figures(
    tracker: MlflowRuns, run: OpenRun, folder: RunFolder, progress: DeliveryState
) -> None:
    """Draw and upload pictures of the whole run; not of a search's trial, nor where the run is to have no pictures."""
    from rankzero.reporting import run_figures

    if folder.identity.parent is not None or not _wants_pictures(folder):
        return
    with tempfile.TemporaryDirectory(prefix="rankzero-") as place:
        try:
            drawn, failed = run_figures.draw(folder, Path(place))
        except Exception as error:  # whatever a user's values do to matplotlib
            if is_want(error):
                raise
            progress.reject("figures", f"{type(error).__name__}: {error}")
            return
        for name, fault in failed.items():
            progress.reject(f"figure {name}", f"{type(fault).__name__}: {fault}")
        for path in drawn:
            tracker.log_artifact(run.run_id, path, FIGURES)


def _wants_pictures(folder: RunFolder) -> bool:
    starts = (event for event in read_all(folder.events) if isinstance(event, RunStarted))
    return all(
        with_new_names(event.params).get("train.mlflow.log_pictures") != "false"
        for event in itertools.islice(starts, 1)
    )


def leads_out(path: Path, base: Path) -> bool:
    """Tell whether a path, or a link at it or below it, leads out of the folder `base`."""
    inside = path.resolve() != base.resolve() and path.resolve().is_relative_to(base.resolve())
    return not inside or any(one.is_symlink() for one in path.rglob("*"))


def _upload_checkpoint(
    tracker: MlflowRuns, run: OpenRun, path: Path, event: CheckpointSaved, progress: DeliveryState
) -> None:
    try:
        tracker.models.save_checkpoint(
            run, event, path, lambda model_id: linked(event, progress, model_id)
        )
    except FileNotFoundError:
        log.info(
            "checkpoint of step %d is gone already: retention removed it before its upload",
            event.step,
        )


def _upload_pictures(
    tracker: MlflowRuns, run: OpenRun, path: Path, event: PicturesTaken, progress: DeliveryState
) -> None:
    """Draw and upload what was seen at a step; what it is drawn from goes once it is there. Again: the same files.

    It stays where the machine lacks something: there is another try.
    """
    from rankzero.reporting import image_grids
    from rankzero.run_store import picture_files

    if not path.exists():
        return  # uploaded already, by one that died before it could say so
    with tempfile.TemporaryDirectory(prefix="rankzero-") as folder:
        try:
            drawn = image_grids.draw(picture_files.read(path), event.step, Path(folder))
        except Exception as error:  # a file that is none of ours, or a picture that cannot be drawn
            if is_want(error):
                raise
            progress.reject(f"pictures of step {event.step}", f"{type(error).__name__}: {error}")
            drawn = {}
        if drawn:
            tracker.log_pictures(
                run.run_id, drawn, event.step, scalars.milliseconds(event.time) or 0
            )
    with contextlib.suppress(
        OSError
    ):  # a folder, or a disk that is read only: it is in MLflow, or told
        path.unlink(missing_ok=True)


def _deleted_later(event: CheckpointSaved, progress: DeliveryState) -> bool:
    later = (decode(word) for word in progress.waiting[1:] if word not in WORDS)
    return any(isinstance(other, CheckpointDeleted) and other.path == event.path for other in later)


def _artifacts(folder: RunFolder) -> Iterator[tuple[Path, str | None]]:
    """Yield each file and the folder that it goes to in MLflow."""
    for base, name in ((folder.artifacts, None), (folder.failures, "failures")):
        for path in sorted(base.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                parts = [part for part in (name, *path.relative_to(base).parent.parts) if part]
                yield path, "/".join(parts) or None

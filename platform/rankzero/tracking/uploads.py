"""Uploads of a run: artifacts, checkpoints and models, pictures. A repetition is harmless."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rankzero import scalars
from rankzero.events import CheckpointDeleted, CheckpointSaved, ModelLogged, PicturesTaken
from rankzero.permanent_errors import NeverAccepted, lacks_resources, refusal
from rankzero.run_store import symlinks
from rankzero.run_store.delivery_state import DeliveryState, Task, Upload
from rankzero.run_store.folder import RunFolder, is_hidden_artifact
from rankzero.tracking.open_run import Target
from rankzero.tracking.retry import log
from rankzero.tracking.translate import Before, linked


def upload(
    item: Upload, target: Target, folder: RunFolder, state: DeliveryState, before: Before
) -> Iterator[DeliveryState]:
    """Do one upload, and yield the state after each change. Raises what MLflow and the disk do."""
    match item:
        case Task.ARTIFACTS:
            yield from _upload_artifacts(target, folder, state)
        case CheckpointDeleted():
            target.store.models.delete_checkpoints(target.run, item.step)
        case CheckpointSaved():
            # Its deletion waits behind it: the bytes need not travel at all.
            if not any(
                isinstance(later, CheckpointDeleted) and later.path == item.path
                for later in state.queue.waiting
            ):
                yield _upload_checkpoint(item, target, folder, state, before)
        case PicturesTaken():
            yield _upload_pictures(item, target, folder, state)
        case ModelLogged():
            yield _upload_model(item, target, folder, state)


def _upload_artifacts(
    target: Target, folder: RunFolder, state: DeliveryState
) -> Iterator[DeliveryState]:
    """Upload the files below `artifacts` and `failures` that are new or changed since.

    Begins behind the last one: a file that grows or is never taken must not hold up the others.
    """
    tops = {folder.artifacts: folder.artifacts, folder.failures: folder.path}
    files = {str(path.relative_to(folder.path)): base for base in tops for path in base.rglob("*")}
    for name in sorted(files, key=lambda name: (name <= state.queue.last_artifact, name)):
        path, base = folder.path / name, files[name]
        if not path.is_file() or is_hidden_artifact(path):
            continue
        # A hash would read every file again at each of a run's ends.
        stat, leads_out = path.stat(), symlinks.leads_out(path, base)
        signature = "leads out" if leads_out else f"{stat.st_size}:{stat.st_mtime_ns}"
        if state.queue.uploaded.get(name) == signature:
            continue
        parts = path.relative_to(tops[base]).parent.parts
        queue = dataclasses.replace(state.queue, last_artifact=name)
        state = dataclasses.replace(state, queue=queue)
        try:
            if leads_out:
                raise NeverAccepted("it leads out of the run's folder")
            target.store.log_artifact(target.run.run_id, path, "/".join(parts) or None)
        except Exception as error:
            reason = refusal(error)
            if reason is None:
                yield state
                raise
            state = _rejected(state, f"artifact {name}", reason)
        state = _uploaded(state, {name: signature})
        yield state


def _upload_checkpoint(
    event: CheckpointSaved,
    target: Target,
    folder: RunFolder,
    state: DeliveryState,
    before: Before,
) -> DeliveryState:
    path = folder.path / event.path
    if symlinks.leads_out(path, folder.checkpoints):
        what = f"{event.path!r} leads out of the run's folder"
        return _rejected(state, f"checkpoint of step {event.step}", what)
    history = functools.partial(target.store.history, target.run.run_id)
    link = functools.partial(linked, event, state.curves, history=history, before=before)
    try:
        target.store.models.save_checkpoint(target.run, event, path, link)
    except FileNotFoundError:
        log.info("retention removed the checkpoint of step %d before its upload", event.step)
    return state


def _upload_model(
    event: ModelLogged, target: Target, folder: RunFolder, state: DeliveryState
) -> DeliveryState:
    path, what = folder.path / event.path, f"model {event.name}"
    if symlinks.leads_out(path, folder.models):
        return _rejected(state, what, f"{event.path!r} leads out of the run's folder")
    if not path.exists():
        return _rejected(state, what, f"{event.path} is gone")
    tags = {"rankzero.step": str(event.step), "rankzero.saved_at": repr(event.time)}
    target.store.models.log_model(target.run, path, event.name, event.step, tags)
    return state


def _upload_pictures(
    event: PicturesTaken, target: Target, folder: RunFolder, state: DeliveryState
) -> DeliveryState:
    """Draw and upload the pictures of a step, then delete the arrays that they are drawn from.

    The arrays stay if the machine lacks something, because there is another try.
    """
    from rankzero.reporting import image_grids
    from rankzero.run_store import picture_files

    path, what = folder.path / event.path, f"pictures of step {event.step}"
    if symlinks.leads_out(path, folder.pictures):
        return _rejected(state, what, f"{event.path!r} leads out of the run's folder")
    if not path.exists():
        # A courier that died before it could write its state may have uploaded them.
        if picture_files.is_done(folder, path):
            return state
        return _rejected(state, what, f"{event.path} is gone")
    with tempfile.TemporaryDirectory(prefix="rankzero-") as place:
        try:
            drawn = image_grids.draw(picture_files.read(path), event.step, Path(place))
        except Exception as error:
            # The file may be foreign, or the picture impossible. A full disk may recover.
            if lacks_resources(error):
                raise
            state = _rejected(state, what, f"{type(error).__name__}: {error}")
        else:
            state = _uploaded(state, _log_pictures(drawn, event, target, folder))
    # A path that cannot be deleted (a folder, a read-only disk) is uploaded or rejected by now.
    with contextlib.suppress(OSError):
        if picture_files.mark_done(folder, path):
            path.unlink(missing_ok=True)
    return state


def _log_pictures(
    drawn: Mapping[str, Path], event: PicturesTaken, target: Target, folder: RunFolder
) -> dict[str, str]:
    if not drawn:
        return {}
    milliseconds = scalars.milliseconds(event.time) or 0
    newest = target.store.log_pictures(target.run.run_id, drawn, event.step, milliseconds)
    return {f"{folder.artifacts.name}/{name}": f"step {event.step}" for name in newest}


def _uploaded(state: DeliveryState, artifacts: Mapping[str, str]) -> DeliveryState:
    uploaded = {**state.queue.uploaded, **artifacts}
    return dataclasses.replace(state, queue=dataclasses.replace(state.queue, uploaded=uploaded))


def _rejected(state: DeliveryState, what: str, reason: str) -> DeliveryState:
    return dataclasses.replace(state, problems=state.problems.reject(what, reason))

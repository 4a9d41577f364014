"""Finds a run in MLflow or creates it. Node 0 creates it, other nodes wait for it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rankzero.catalog import command_lines, deleted, lookup, moved
from rankzero.events import RunStarted, SystemSampled
from rankzero.metric_names import WHOLE_RUN
from rankzero.mlflow_store import uris
from rankzero.mlflow_store.items import CLAIM
from rankzero.run_store import names, run_locks
from rankzero.run_store.delivery_state import DeliveryState, load, path_of
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import milestones, read, read_all
from rankzero.tracking.translate import is_others

if TYPE_CHECKING:
    from rankzero.mlflow_store.client import MlflowRuns, RunRecord

# MLflow imports the first three for data sets and models, if they are there. Its package
# mlflow-skinny lacks them. Mako, which MLflow's migrations import, highlights code with Pygments.
_NOT_NEEDED = ("numpy", "pandas", "pyarrow", "pygments")
# The kinds of plugins that MLflow brings along. Others may need any package.
_MLFLOWS_OWN = {"mlflow.app", "mlflow.app.client", "mlflow.deployments"}


class Target(NamedTuple):
    """The MLflow run that a journal is delivered to, and its store."""

    store: MlflowRuns
    run: RunRecord


class OtherAttempt(NamedTuple):
    """The newest attempt that MLflow knows of a run, if another machine began it."""

    began: float
    host: str


def connect(tracking_uri: str) -> MlflowRuns:
    """Return the tracking store. For processes that load no code of the user's.

    The first one of a process takes two fifths of the processor time that it would else take. On a
    busy machine, a second of that takes ten and more.
    """
    if "mlflow" in sys.modules:
        return _store(tracking_uri)
    found = {name for name in importlib.metadata.entry_points().groups if name[:7] == "mlflow."}
    blocked = () if found - _MLFLOWS_OWN else {*_NOT_NEEDED}.difference(sys.modules)
    # Half a million objects come and stay. The collector would walk all of them several times.
    gc.disable()
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]
    try:
        return _store(tracking_uri)
    finally:
        for name in blocked:
            del sys.modules[name]
        gc.freeze()
        gc.enable()


def _store(tracking_uri: str) -> MlflowRuns:
    from rankzero.mlflow_store.client import MlflowRuns

    return MlflowRuns(tracking_uri)


def origin(folder: RunFolder) -> str | None:
    """Return the store that the run's folder, or its whole store, was moved or copied from."""
    uri, path = folder.identity.tracking_uri, uris.sqlite_path(folder.identity.tracking_uri)
    is_known = (lookup.mlflow_id(folder) or "") in deleted.read_store(folder.path.parent).runs
    mine = folder.root / uris.DATABASE
    if is_known and (path is None or path.resolve() != mine.resolve()):
        return uri
    home = RunFolder((mine if path is None else path).parent / "runs" / folder.path.name)
    with contextlib.suppress(names.InvalidRunFolder):
        if home.identity.uuid == folder.identity.uuid and not home.path.samefile(folder.path):
            return uri
    return None


def former_store(folder: RunFolder) -> Path | None:
    """Return the former folder of a store that was moved or copied; None if it has the run.

    A delivery would make that store again, or change the one that a copy was made of.
    """
    path = uris.sqlite_path(folder.identity.tracking_uri)
    if path is None or folder.is_elsewhere or moved.same(path.parent, folder.root):
        return None
    # A database that somebody put elsewhere may be away for a moment, as a share is.
    is_mine = path.parent.name == folder.root.name
    is_mine |= path.is_relative_to(folder.identity.project_dir or folder.root)
    is_gone = is_mine and path.name == uris.DATABASE and not path.parent.exists()
    is_former = is_gone or path.parent in moved.former_places(folder.root) or origin(folder)
    return path.parent if is_former else None


def require_home(folder: RunFolder) -> None:
    """Raise StoreMoved if the run's store was moved or copied."""
    if place := former_store(folder):
        command = command_lines.line(folder.root, "relocate")
        raise uris.StoreMoved(
            f"its store was moved or copied from {place}: {command}, or deliver the run there"
        )


def open_run(
    folder: RunFolder, node: int, connect: Callable[[str], MlflowRuns], known: str | None = None
) -> Target | None:
    """Return the folder's run in MLflow, or None while another process has yet to create one.

    Node 0 creates the run, and other nodes look for it. A child waits for its parent's run.
    `known`: the run's id, if something was delivered to it. Raises RunGone if it was deleted, or
    if its store was moved.
    """
    require_home(folder)
    identity, experiment_id = folder.identity, None
    if known is None and node > 0:
        # Node 0 may share the folder.
        known = load(path_of(folder, 0)).run_id
    if known is not None:
        # By its id: its experiment may have another name by now.
        store = connect(identity.tracking_uri)
        store.require_run(known)
        run = store.find_open_run(dataclasses.replace(identity, mlflow_run_id=known))
        return None if run is None else Target(store, run)
    # This courier delivers the run above too, and its state is on this disk.
    if identity.parent is not None:
        above = load(path_of(RunFolder(folder.path.parent / identity.parent), 0))
        if above.run_id is None:
            return None
        # That experiment may have another name by now, too.
        experiment_id = above.experiment_id
        identity = dataclasses.replace(identity, parent_run_id=above.run_id)
    store = connect(identity.tracking_uri)
    # Only MLflow knows the run of a shared study, or of the child that has this one as a child.
    if identity.parent_uuid is not None:
        parent = dataclasses.replace(identity, uuid=identity.parent_uuid, mlflow_run_id=None)
        study = store.find_open_run(parent, experiment_id)
        if study is None:
            return None
        identity = dataclasses.replace(identity, parent_run_id=study.run_id)
    if node > 0:
        run = store.find_open_run(identity, experiment_id)
    else:
        # The run's start time in MLflow is the first event's, however late it is delivered.
        events, _ = read(folder.events, 0, 1)
        starts = (event.time for event in events if isinstance(event, RunStarted))
        run = store.open_run(identity, next(starts, time.time()), experiment_id)
    return None if run is None else Target(store, run)


def adopt(state: DeliveryState, run: RunRecord, node: int, from_elsewhere: bool) -> DeliveryState:
    """Return the state of a run that MLflow already has points of, sent by another process.

    `from_elsewhere`: another machine sent them. The samples and attempts of this one come after.
    """
    curves = state.curves
    newer = {key: at for key, at in run.marks.items() if at > curves.marks.get(key, at - 1)}
    offset, attempts = curves.sample_offset, curves.attempt_offset
    if from_elsewhere:
        sent = _last_sample(curves.marks, node, offset - 1)
        offset += max(0, _last_sample(run.marks, node, sent) - sent)
        figures = (at for key, at in run.marks.items() if key.startswith(f"{WHOLE_RUN}/"))
        attempts = max(attempts, 1 + max(figures, default=-1) - curves.attempt)
        marks, floor = {**curves.marks, **newer}, {**curves.floor, **newer}
        curves = dataclasses.replace(curves, marks=marks, floor=floor)
    else:
        curves = dataclasses.replace(curves, replayed={**curves.replayed, **newer})
    curves = dataclasses.replace(curves, sample_offset=offset, attempt_offset=attempts)
    return dataclasses.replace(
        state, run_id=run.run_id, experiment_id=run.experiment_id, curves=curves
    )


def other_attempt(folder: RunFolder, run: RunRecord) -> OtherAttempt | None:
    """Return the newest attempt that MLflow knows, or None if this disk's journal has it.

    None too for a run of an earlier version, which has no tag.
    """
    text, _, host = run.tags.get(CLAIM, "").partition(" ")
    began = 0.0
    with contextlib.suppress(ValueError):  # anyone may change a tag
        began = float(text)
    is_known = not began > 0 or began in _starts(folder)
    return None if is_known else OtherAttempt(began, host or "another machine")


def refuse_older(folder: RunFolder, other: OtherAttempt | None, is_new: bool = False) -> None:
    """Raise RunContinued if no attempt of this disk began after another machine's.

    `is_new`: MLflow does not know this disk's newest attempt yet. While its writer lives, it is the
    later one, whatever the two clocks say.
    """
    if other is None:
        return
    claim = run_locks.latest(folder, 0)
    newest = max([*_starts(folder), 0.0 if claim is None else claim.time])
    if newest > other.began or (is_new and run_locks.writer_lives(folder)):
        return
    raise uris.RunContinued(
        f"{other.host} has continued the run, so MLflow gets nothing more of the attempt here"
    )


def leave_to(other: OtherAttempt, state: DeliveryState, run: RunRecord) -> DeliveryState:
    """Return the state without what would replace the other attempt's end and checkpoints."""
    curves = dataclasses.replace(
        state.curves, other_began=other.began, other_step=newest_step(run.marks)
    )
    waiting = tuple(one for one in state.queue.waiting if not is_others(one, curves))
    queue = dataclasses.replace(state.queue, ending=None, waiting=waiting)
    return dataclasses.replace(state, curves=curves, queue=queue)


def newest_step(marks: Mapping[str, int]) -> int:
    """Return the newest step of a run's training in MLflow, or -1."""
    # The steps of these are numbers of samples and of attempts.
    others = ("system/", f"{WHOLE_RUN}/")
    return max((at for key, at in marks.items() if not key.startswith(others)), default=-1)


def _starts(folder: RunFolder) -> set[float]:
    return {one.time for one in milestones(folder.events) if isinstance(one, RunStarted)}


def has_others_samples(folder: RunFolder, node: int, state: DeliveryState, run: RunRecord) -> bool:
    """Return whether MLflow has more samples than this machine took before its newest attempt.

    A courier that is killed may have sent samples that its state lacks. They are no others'.
    """
    found, claim = _last_sample(run.marks, node, -1), run_locks.latest(folder, node)
    if claim is None or found <= _last_sample(state.curves.marks, node, -1):
        return False
    taken = (
        one.sample
        for one in read_all(folder.system(node))
        if isinstance(one, SystemSampled) and one.time < claim.time
    )
    return found > max(taken, default=-1) + state.curves.sample_offset


def _last_sample(marks: Mapping[str, int], node: int, default: int) -> int:
    mine = f"system/node_{node}/"
    # The names of a run on one machine have no node.
    alone = "system/" if node == 0 else mine
    samples = (
        at
        for key, at in marks.items()
        if key.startswith(mine) or (key.startswith(alone) and not key.startswith("system/node_"))
    )
    return max(samples, default=default)

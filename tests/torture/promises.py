"""What must be true after whatever happened. Each check raises `Broken`."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable

import psutil

from rankzero.catalog.lookup import mlflow_id
from rankzero.events import CheckpointDeleted, CheckpointSaved, PicturesTaken, RunEnded
from rankzero.mlflow_store.client import MlflowRuns, RunRecord
from rankzero.run_store import checkpoint_files
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.tracking import delivery_status, sync
from rankzero.training.checkpoints import restore
from support.commands import losses as journaled
from support.stores import list_runs
from torture import curves
from torture.curves import Curves
from torture.ground import LEAVE_SECONDS, ORPHAN_SECONDS, Broken, Ground, wait_for
from torture.room import shared_memory

__all__ = ["Curves", "journaled"]

TRACEBACK = "Traceback (most recent call last)"
LOGGED = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z]+ ", re.MULTILINE)
"""How a line begins that a recorder or courier logs."""


def no_process_is_left(
    ground: Ground, seconds: float = ORPHAN_SECONDS, leave: float = LEAVE_SECONDS
) -> None:
    """Every process of the scenario ends by itself, and with it goes its port: soon, or once it has delivered.

    `seconds`: what who delivers has for it; `leave`: what everybody else gets, launchers, ranks, trials.
    """
    began = time.monotonic()
    _have_left(ground.idlers, leave)
    ground.idling = max(ground.idling, time.monotonic() - began)
    _have_left(ground.processes, began + seconds - time.monotonic())
    ground.leaving = max(ground.leaving, time.monotonic() - began)


def _have_left(found: Callable[[], list[psutil.Process]], seconds: float) -> None:
    if not wait_for(lambda: not found(), seconds) and (left := found()):
        raise Broken(f"orphan: {'; '.join(map(_describe, left))}")


def _describe(process: psutil.Process) -> str:
    """Return a process in words: its number, its command, the ports that it listens on."""
    told, ports = f"{process.pid} (gone by now)", []
    with contextlib.suppress(psutil.Error):
        told = f"{process.pid} {' '.join(' '.join(process.cmdline()).split())[:120]}"
        ports = [
            one.laddr.port
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        ]
    return " ".join([told, *(f"which listens on port {port}" for port in sorted(set(ports)))])


def delivered(run: RunFolder) -> RunRecord:
    """Return the run as MLflow has it, once everything that can be delivered is."""
    for _ in range(3):
        if sync.deliver(run).done:
            break
    else:
        raise Broken(f"lost: {run.path.name} is not delivered after `sync`")
    run_id = mlflow_id(run)
    if run_id is None:
        raise Broken(f"lost: {run.path.name} is not in MLflow")
    return MlflowRuns(run.identity.tracking_uri).find_run(run_id)


def nothing_is_lost(
    run: RunFolder, reference: Curves, *, steps: int | None = None, spoiled: int | None = None
) -> None:
    """MLflow has every journaled value once, and those are the values of a training that nobody disturbed.

    `steps`: as many there must be, with their evaluations; None: as far as the journal goes, without a gap.
    `spoiled`: the step from which on the scenario itself made the values wrong.
    """
    record, mine = delivered(run), curves.latest(run)
    curves.have_arrived(curves.first(run), curves.in_mlflow(run, record.run_id, mine))
    curves.have_no_gap(mine, steps)
    curves.are_undisturbed(mine, reference, spoiled)
    if steps is not None:
        curves.have_all(mine, reference)


def delivered_without_sync(run: RunFolder) -> None:
    """MLflow was given everything by the run's own recorder, which knows it: there is nothing for `sync` to do."""
    run_id = mlflow_id(run)
    if run_id is None:
        raise Broken(f"lost: {run.path.name} is not in MLflow without `sync`: it has no id")
    found, journaled = delivery_status.status(run), curves.first(run)
    curves.have_arrived(journaled, curves.in_mlflow(run, run_id, journaled))
    if found.pending:
        raise Broken(
            f"lost: {found.pending} of {run.path.name} are not in MLflow without `sync`: {found.error}"
        )
    if not found.done:
        raise Broken(
            f"wrong: all of {run.path.name} is in MLflow, and the recorder leaves it to `sync`: {found.error}"
        )


def pictures_are_there(ground: Ground, run: RunFolder) -> None:
    """Each step with pictures has them among the run's artifacts, and nothing that they were drawn from is left."""
    record = delivered(run)
    left = sorted(path.name for path in run.pictures.glob("*"))
    if left:
        raise Broken(f"orphan: pictures/ holds {', '.join(left)}")
    steps = {event.step for event in read_all(run.events) if isinstance(event, PicturesTaken)}
    images = ground.folder.glob(
        f"mlruns/artifacts/*/{record.run_id}/artifacts/images/pictures~confusion_matrix+step+*"
    )
    missing = steps - {int(path.name.split("+")[2]) for path in images}
    if missing or not steps:
        raise Broken(
            f"lost: of {len(steps)} steps with pictures {sorted(missing)} are not in MLflow"
        )


def status_is(run: RunFolder, *allowed: str) -> str:
    """MLflow's status is one of `allowed`, and the journal says the same."""
    record = delivered(run)
    ended = [event for event in read_all(run.events) if isinstance(event, RunEnded)]
    if record.status not in allowed:
        raise Broken(
            f"wrong status: {run.path.name} is {record.status}, wanted {' or '.join(allowed)}"
        )
    if ended and ended[-1].status != record.status:
        raise Broken(f"wrong status: the journal says {ended[-1].status}, MLflow {record.status}")
    return record.status


def checkpoints_are_intact(run: RunFolder) -> int:
    """Every checkpoint under its final name is whole, whatever was killed; return the newest's step, 0 without one.

    And those are there that the journal tells of and that nothing may have deleted: the newest, and the best.
    """
    offered = _offered(run)  # first: it puts back what was being replaced
    for path in sorted(run.checkpoints.glob("step_*")):
        try:
            step, told = restore.load(path)["step"], checkpoint_files.read_manifest(path).step
        except checkpoint_files.BrokenCheckpoint as error:
            raise Broken(f"corrupt: {error}") from None
        if step != told or path != checkpoint_files.folder_of(run.checkpoints, step):
            raise Broken(f"corrupt: {path.name} holds step {step}, its manifest says {told}")
    _newest_and_best_are_there(run)
    return offered


def _offered(run: RunFolder) -> int:
    """Return the step that a resume goes on from: the newest there is."""
    path, problems = checkpoint_files.newest_intact(run.checkpoints)
    if problems:
        raise Broken(f"corrupt: {'; '.join(problems)}")
    return 0 if path is None else checkpoint_files.read_manifest(path).step


def _newest_and_best_are_there(run: RunFolder) -> None:
    """The newest checkpoint that was saved, and the best one, are there, or one that has superseded them.

    A later one may be there that the journal does not know, and another not that it does: rank 0 was killed before it
    could tell of either.
    """
    there = {
        told.step: told.best
        for told in map(checkpoint_files.read_manifest, run.checkpoints.glob("step_*"))
    }
    saved = _saved(run)
    newest, best = (
        max(saved, default=0),
        max((step for step, best in saved.items() if best), default=0),
    )
    if newest > max(there, default=0):
        raise Broken(
            f"lost: the newest checkpoint, of step {newest}, is gone: there are {sorted(there)}"
        )
    if (
        best
        and best not in there
        and not any(better for step, better in there.items() if step > best)
    ):
        raise Broken(
            f"lost: the best checkpoint, of step {best}, is gone: there are {sorted(there)}"
        )


def _saved(run: RunFolder) -> dict[int, bool]:
    """Return the steps whose checkpoints were saved and not deleted, and whether each was the best by then."""
    found: dict[int, bool] = {}
    for event in read_all(run.events):
        if isinstance(event, CheckpointSaved):
            found[event.step] = event.best
        elif isinstance(event, CheckpointDeleted):
            found.pop(event.step, None)
    return found


def no_run_is_running(ground: Ground) -> None:
    """Nothing waits for delivery after `sync`, and MLflow has no run that seems to go on."""
    ground.run("sync")
    left = [run.name for run in list_runs(ground.store) if run.status == "RUNNING"]
    if left:
        raise Broken(f"wrong status: still RUNNING in MLflow: {', '.join(left)}")


def no_traceback_is_printed(ground: Ground) -> None:
    """Whatever went wrong was told in words, to users; and what works beside the training did not die of it."""
    for output in sorted(ground.folder.glob("output-*.txt")):
        _, found, rest = output.read_text(errors="replace").partition(TRACEBACK)
        if found:
            raise Broken(f"wrong: a traceback in {output.name}: …{rest[-400:]}")
    for log in sorted(ground.runs_folder.glob("*/recorder*.log")):
        _, found, rest = log.read_text(errors="replace").rpartition(TRACEBACK)
        if (
            found and rest.endswith("\n") and not LOGGED.search(rest)
        ):  # MLflow logs its own; a full disk cuts what it cuts
            raise Broken(f"wrong: {log.name} ends with a traceback: …{rest[-400:]}")


def nothing_is_left(
    ground: Ground, seconds: float = ORPHAN_SECONDS, leave: float = LEAVE_SECONDS
) -> None:
    """No process of the scenario lives, so none of its ports is open, and none of its shared memory is left."""
    no_process_is_left(ground, seconds, leave)
    files = sorted(shared_memory() - ground.shared_memory)
    if files:
        raise Broken(f"orphan: shared memory {', '.join(files)}")

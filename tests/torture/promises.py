"""Promises that must hold after any fault. Each check raises `Broken` if one does not."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection

import psutil

from rankzero import scalars
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

RETRIED = "unexpected error; trying again"
TRACEBACK = "Traceback (most recent call last)"
# The beginning of a line that a recorder or courier logs.
LOGGED = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z]+ ", re.MULTILINE)

# A log that ends with an error, its traceback included, after which the process tried again.
LAST_RETRY = re.compile(rf"{RETRIED}\n{re.escape(TRACEBACK)}(?!.*\n\d{{4}}-\d\d-\d\d )", re.DOTALL)
# The file of a semaphore that glibc has not given its name yet.
UNNAMED_SEMAPHORE = re.compile(r"sem\.[A-Za-z0-9]{6}")


def no_process_is_left(
    ground: Ground, seconds: float = ORPHAN_SECONDS, leave: float = LEAVE_SECONDS
) -> None:
    """Check that every process of the scenario ends without a signal, which also closes its ports.

    `seconds`: the limit for recorders and couriers, which deliver. `leave`: the limit for all other
    processes, such as launchers, ranks and trials.
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
    """Return the pid and the command of a process, and the ports that it listens on."""
    text, ports = f"{process.pid} (has ended meanwhile)", []
    with contextlib.suppress(psutil.Error):
        text = f"{process.pid} {' '.join(' '.join(process.cmdline()).split())[:120]}"
        ports = [
            one.laddr.port
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        ]
    return " ".join([text, *(f"which listens on port {port}" for port in sorted(set(ports)))])


def delivered(run: RunFolder) -> RunRecord:
    """Deliver the run, in three tries at most, and return MLflow's record of it."""
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
    run: RunFolder,
    reference: Curves,
    *,
    steps: int | None = None,
    spoiled: int | None = None,
    ignored: Collection[int] = (),
    power_cut: bool = False,
) -> None:
    """Check that MLflow has every step once, with the values of an undisturbed training.

    `steps`: journal and MLflow must have exactly this many steps, with their evaluations. None
    accepts any number without a gap. `spoiled`: the first step whose values the scenario itself
    made wrong. `ignored`: steps that MLflow keeps with such values from an earlier attempt. After a
    `power_cut`, MLflow may have steps whose lines the journal lost.
    """
    record, mine = delivered(run), curves.latest(run)
    points = curves.in_mlflow(run, record.run_id, {**mine, **reference})
    if not power_cut:
        curves.have_arrived(curves.first(run), points)
    curves.have_no_gap(mine, steps)
    # Two attempts in a row may have had such values.
    later = (one for one in reference[curves.ORIGIN] if spoiled is not None and one >= spoiled)
    curves.match_oracle(points, mine, reference, steps, {*ignored, *later})
    if steps is not None:
        curves.best_is(scalars.number(record.tags.get("rankzero.best")), reference)
    curves.are_undisturbed(mine, reference, spoiled)
    if steps is not None:
        curves.have_all(mine, reference)


def delivered_without_sync(run: RunFolder) -> None:
    """Check that the run's own recorder delivered everything, and noted that it is done."""
    run_id = mlflow_id(run)
    if run_id is None:
        raise Broken(f"lost: {run.path.name} is not in MLflow without `sync`: it has no id")
    found, journaled = delivery_status.status(run), curves.first(run)
    curves.have_arrived(journaled, curves.in_mlflow(run, run_id, journaled))
    if found.pending:
        raise Broken(
            f"lost: {found.pending} of {run.path.name} are not in MLflow without `sync`: "
            f"{found.error}"
        )
    if not found.done:
        raise Broken(
            f"wrong: MLflow has all of {run.path.name}, but the recorder did not note that: "
            f"{found.error}"
        )


def pictures_are_there(ground: Ground, run: RunFolder) -> None:
    """Check that MLflow has the pictures of each step, and that their sources are deleted."""
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
    """Check that MLflow's status is one of `allowed` and the journal's. Return it."""
    record = delivered(run)
    ended = [event for event in read_all(run.events) if isinstance(event, RunEnded)]
    if record.status not in allowed:
        raise Broken(
            f"wrong status: {run.path.name} is {record.status}, wanted {' or '.join(allowed)}"
        )
    if ended and ended[-1].status != record.status:
        raise Broken(f"wrong status: the journal has {ended[-1].status}, MLflow {record.status}")
    return record.status


def checkpoints_are_intact(run: RunFolder) -> int:
    """Check that every checkpoint is intact. Return the newest one's step, or 0 without one.

    The newest and the best checkpoint that the journal names must exist.
    """
    # This comes first, because it finishes interrupted replacements.
    offered = _offered(run)
    for path in sorted(run.checkpoints.glob("step_*")):
        try:
            step = restore.load(path)["step"]
            named = checkpoint_files.read_manifest(path).step
        except checkpoint_files.BrokenCheckpoint as error:
            raise Broken(f"corrupt: {error}") from None
        if step != named or path != checkpoint_files.folder_of(run.checkpoints, step):
            raise Broken(f"corrupt: {path.name} holds step {step}, its manifest names step {named}")
    _newest_and_best_are_there(run)
    return offered


def _offered(run: RunFolder) -> int:
    """Return the step that a resume would start from: the newest checkpoint's, or 0."""
    path, problems = checkpoint_files.newest_intact(run.checkpoints)
    if problems:
        raise Broken(f"corrupt: {'; '.join(problems)}")
    return 0 if path is None else checkpoint_files.read_manifest(path).step


def _newest_and_best_are_there(run: RunFolder) -> None:
    """Check that the newest and the best saved checkpoint exist, or later ones in their place."""
    # Rank 0 may be killed between a change of the folder and its line in the journal. So the folder
    # may have a checkpoint that the journal lacks, or lack one that the journal names.
    there = {
        manifest.step: manifest.best
        for manifest in map(checkpoint_files.read_manifest, run.checkpoints.glob("step_*"))
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
    """Return, by step, whether the checkpoint was the best when saved. Leaves out deleted ones."""
    found: dict[int, bool] = {}
    for event in read_all(run.events):
        if isinstance(event, CheckpointSaved):
            found[event.step] = event.best
        elif isinstance(event, CheckpointDeleted):
            found.pop(event.step, None)
    return found


def no_run_is_running(ground: Ground) -> None:
    """Check that `sync` succeeds, and that no run in MLflow still has the status RUNNING."""
    ground.run("sync")
    left = [run.name for run in list_runs(ground.store) if run.status == "RUNNING"]
    if left:
        raise Broken(f"wrong status: still RUNNING in MLflow: {', '.join(left)}")


def no_traceback_is_printed(ground: Ground) -> None:
    """Check that no command printed a traceback, and that none ended a recorder or a courier."""
    for output in sorted(ground.folder.glob("output-*.txt")):
        _, found, rest = output.read_text(errors="replace").partition(TRACEBACK)
        if found:
            raise Broken(f"wrong: a traceback in {output.name}: …{rest[-400:]}")
    for log in sorted(ground.runs_folder.glob("*/recorder*.log")):
        text = log.read_text(errors="replace")
        _, found, rest = text.rpartition(TRACEBACK)
        if LAST_RETRY.search(text):
            continue
        # MLflow logs tracebacks of its own, and a full disk may cut a log anywhere.
        if found and rest.endswith("\n") and not LOGGED.search(rest):
            raise Broken(f"wrong: {log.name} ends with a traceback: …{rest[-400:]}")


def nothing_is_left(
    ground: Ground, seconds: float = ORPHAN_SECONDS, leave: float = LEAVE_SECONDS
) -> None:
    """Check that no process, and so no port, and no shared memory of the scenario is left."""
    no_process_is_left(ground, seconds, leave)
    found = sorted(shared_memory() - ground.shared_memory)
    # SIGKILL within sem_open: glibc had made the file, and not yet given it the semaphore's name.
    files = [name for name in found if not UNNAMED_SEMAPHORE.fullmatch(name)]
    if files:
        raise Broken(f"orphan: shared memory {', '.join(files)}")

"""What must be true after whatever happened. Each check raises `Broken`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path

import psutil

from cli.conftest import losses as journaled
from rankzero.events import Evaluated, PicturesTaken, RunEnded, StepsLogged
from rankzero.tracking import sync
from rankzero.tracking.catalog import mlflow_id
from rankzero.tracking.folder import RunFolder
from rankzero.tracking.journal import read_all
from rankzero.tracking.mlflow import RunRecord, Tracker
from rankzero.train import checkpoint
from torture.ground import ORPHAN_SECONDS, Broken, Ground, wait_for
from torture.room import shared_memory

__all__ = ["journaled"]

Losses = Mapping[int, float]


def first_journaled(run: RunFolder) -> dict[int, float]:
    """Return the journal's train/loss by step, the first attempt's that came so far: what MLflow keeps."""
    found: dict[int, float] = {}
    for event in read_all(run.events):
        if isinstance(event, StepsLogged) and "train/loss" in event.metrics:
            found = {**dict(zip(event.steps, event.metrics["train/loss"], strict=True)), **found}
    return found


def nobody_is_left(ground: Ground, seconds: float = ORPHAN_SECONDS) -> None:
    """Every process of the scenario ends by itself."""
    if not wait_for(lambda: not ground.processes(), seconds):
        left = [f"{process.pid} {' '.join(process.cmdline())[:120]}" for process in ground.processes()]
        raise Broken(f"orphan: {'; '.join(left)}")


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
    return Tracker(run.identity.tracking_uri).find_run(run_id)


def nothing_is_lost(run: RunFolder, reference: Losses, *, steps: int | None = None) -> None:
    """MLflow has every journaled step once, with the value of a training that nobody disturbed.

    `steps`: as many there must be; None: as far as the journal goes, without a gap.
    """
    record, mine = delivered(run), journaled(run)
    points = Tracker(run.identity.tracking_uri).history(record.run_id, "train/loss")
    theirs = {point.step: point.value for point in points}
    if len(points) != len(theirs):
        raise Broken(f"wrong: MLflow has {len(points)} points for {len(theirs)} steps")
    missing = sorted(set(mine) - set(theirs))
    if missing:
        raise Broken(f"lost: steps {missing[:5]}… ({len(missing)}) of {run.path.name} are not in MLflow")
    if sorted(mine) != list(range(1, (steps or len(mine)) + 1)):
        raise Broken(
            f"lost: the journal has {len(mine)} steps up to {max(mine, default=0)}, wanted {steps or 'no gap'}"
        )
    for told, wanted, whose in ((theirs, first_journaled(run), "MLflow"), (mine, reference, "the journal")):
        wrong = [step for step, value in told.items() if not _alike(value, wanted[step])]
        if wrong:
            step = wrong[0]
            raise Broken(f"wrong: in {whose} the loss of step {step} is {told[step]}, wanted {wanted[step]}")


def _alike(value: float, wanted: float) -> bool:
    """Tell whether a value is the one wanted; a NaN that ended an attempt may be one."""
    return value == wanted or math.isnan(value)


def pictures_are_there(ground: Ground, run: RunFolder) -> None:
    """Each step with pictures has them among the run's artifacts, and nothing that they were drawn from is left."""
    record = delivered(run)
    left = sorted(path.name for path in run.pictures.glob("*"))
    if left:
        raise Broken(f"orphan: pictures/ holds {', '.join(left)}")
    steps = {event.step for event in read_all(run.events) if isinstance(event, PicturesTaken)}
    images = ground.folder.glob(f"mlruns/artifacts/*/{record.run_id}/artifacts/images/pictures~confusion_matrix+step+*")
    missing = steps - {int(path.name.split("+")[2]) for path in images}
    if missing or not steps:
        raise Broken(f"lost: of {len(steps)} steps with pictures {sorted(missing)} are not in MLflow")


def status_is(run: RunFolder, *allowed: str) -> str:
    """MLflow's status is one of `allowed`, and the journal says the same."""
    record = delivered(run)
    ended = [event for event in read_all(run.events) if isinstance(event, RunEnded)]
    if record.status not in allowed:
        raise Broken(f"wrong status: {run.path.name} is {record.status}, wanted {' or '.join(allowed)}")
    if ended and ended[-1].status != record.status:
        raise Broken(f"wrong status: the journal says {ended[-1].status}, MLflow {record.status}")
    return record.status


def checkpoint_is_intact(run: RunFolder) -> int:
    """The newest checkpoint that is offered can be loaded; return its step, 0 without one."""
    path, _ = checkpoint.newest_intact(run.checkpoints)
    if path is None:
        if any(isinstance(event, Evaluated) for event in read_all(run.events)) and any(run.checkpoints.glob("step_*")):
            raise Broken("corrupt: there are checkpoints, and none is intact")
        return 0
    step = checkpoint.load(path)["step"]
    if step != checkpoint.read_manifest(path).step:
        raise Broken(f"corrupt: {path.name} holds step {step}")
    return int(step)


def no_run_is_running(ground: Ground) -> None:
    """Nothing waits for delivery after `sync`, and MLflow has no run that seems to go on."""
    ground.run("sync")
    left = [run.name for run in Tracker(ground.store).list_runs() if run.status == "RUNNING"]
    if left:
        raise Broken(f"wrong status: still RUNNING in MLflow: {', '.join(left)}")


def nothing_is_left(ground: Ground) -> None:
    """No process of the scenario lives, none of its shared memory is left, and nobody listens on its ports."""
    nobody_is_left(ground)
    files = sorted(shared_memory() - ground.shared_memory)
    if files:
        raise Broken(f"orphan: shared memory {', '.join(files)}")
    if not wait_for(lambda: not _listening(ground), ORPHAN_SECONDS):
        raise Broken(f"orphan: {', '.join(_listening(ground))}")


def _listening(ground: Ground) -> list[str]:
    """Return who listens on a port that is still open, of those whose working directory is the scenario's."""
    found = []
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid is not None:
            with contextlib.suppress(psutil.Error):
                where = Path(psutil.Process(connection.pid).cwd())
                if where.is_relative_to(ground.folder):
                    found.append(f"process {connection.pid} listens on port {connection.laddr.port}")
    return found

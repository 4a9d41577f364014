"""Damaged checkpoints, and checkpoints that cannot be written."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from pathlib import Path

from rankzero.events import RunStarted
from rankzero.run_store import checkpoint_files
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.training.checkpoints import restore
from torture import promises
from torture.damage import DAMAGES, REFUSED
from torture.disks import Disk, small_disk
from torture.ground import Broken, Ground, wait_for
from torture.promises import Curves
from torture.scenarios.training import (
    CLOCK,
    LATER,
    SETTINGS,
    SLOW,
    STEPS,
    TINY,
    at_a_random_moment,
    ends,
    finished,
    the_run,
)

DAMAGES_EACH = 6 * len(DAMAGES)
# How often one training's disk is filled or made read-only.
MOST_FULL = 12


def damaged_checkpoints(ground: Ground, reference: Curves) -> None:
    """Damage checkpoints: a resume uses the one before, or none, and never executes code."""
    ground.run("train", TINY, *SETTINGS, "train.checkpoints.keep=3")
    run = the_run(ground)
    whole = ground.folder / "whole"
    shutil.copytree(run.checkpoints, whole)
    for damage in itertools.islice(itertools.cycle(DAMAGES), DAMAGES_EACH):
        newest = _newest(run)
        ground.note_fault(f"checkpoint {damage}")
        proof = ground.folder / "executed"
        DAMAGES[damage](newest, ground.random, proof)
        _is_not_loaded(newest, damage)
        if proof.exists():
            raise Broken(f"executed: loading a checkpoint that is {damage} ran its code")
        if damage not in REFUSED:
            _one_before_is_offered(run, whole, damage)
        _put_back(run, whole)
    for damage in REFUSED:
        _is_refused(ground, run, damage)
        _put_back(run, whole)
    newest = _newest(run)
    DAMAGES[ground.next_of(("truncated", "bit-flipped", "emptied", "zeroed"))](
        newest, ground.random, proof
    )
    # Retention must not keep the damaged checkpoint and delete the intact ones.
    ground.run("resume", "run", f"train.steps={STEPS}", "train.checkpoints.keep=1")
    _resumed_from(run, sorted(whole.glob("step_*"))[-2])
    finished(ground, reference)


def _is_not_loaded(damaged: Path, damage: str) -> None:
    with contextlib.suppress(checkpoint_files.BrokenCheckpoint):
        restore.load(damaged)
        raise Broken(f"corrupt: {damaged.name} is loaded, though {damage}")


def _one_before_is_offered(run: RunFolder, whole: Path, damage: str) -> None:
    """Check that the checkpoint before the damaged newest one is offered, and is unchanged."""
    path, _ = checkpoint_files.newest_intact(run.checkpoints)
    wanted = sorted(whole.glob("step_*"))[-2]
    if path is None or path.name != wanted.name:
        raise Broken(
            f"corrupt: after {damage}, {path and path.name} is offered, wanted {wanted.name}"
        )
    if _content(path) != _content(wanted):
        raise Broken(f"corrupt: after {damage}, {path.name} has changed")


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _resumed_from(run: RunFolder, wanted: Path) -> None:
    """Check that the last attempt began at the step of the wanted checkpoint."""
    begun = [event.step for event in read_all(run.events) if isinstance(event, RunStarted)]
    if begun[-1] != checkpoint_files.read_manifest(wanted).step:
        raise Broken(f"corrupt: the run resumed from step {begun[-1]}, wanted {wanted.name}")


def _newest(run: RunFolder) -> Path:
    return sorted(run.checkpoints.glob("step_*"))[-1]


def _put_back(run: RunFolder, whole: Path) -> None:
    shutil.rmtree(run.checkpoints)
    shutil.copytree(whole, run.checkpoints)


def _is_refused(ground: Ground, run: RunFolder, damage: str) -> None:
    """Check that a resume exits with 1, names the checkpoint, and executes none of its code."""
    newest, proof = _newest(run), ground.folder / "executed"
    REFUSED[damage](newest, ground.random, proof)
    ground.note_fault(f"resume from a checkpoint that is {damage}")
    # A later end: a finished run with an intact checkpoint has nothing to resume.
    command = ground.run("resume", "run", f"train.steps={2 * STEPS}", code=1)
    if proof.exists():
        raise Broken(f"executed: a resume from a checkpoint that is {damage} ran its code")
    if newest.name not in command.output.read_text():
        raise Broken(
            f"wrong: the error of a resume from a checkpoint that is {damage} does not name "
            f"{newest.name}: {command.tail()}"
        )
    promises.no_process_is_left(ground)
    promises.status_is(run, "FAILED")


def checkpoint_disk(ground: Ground, reference: Curves) -> None:
    """Fill or protect the checkpoints' disk: training continues, and saved checkpoints stay."""
    command = ground.start("train", CLOCK, *SLOW, "step_seconds=0.05")
    folder = ground.runs_folder / "run" / "checkpoints"
    wait_for(lambda: (folder.parent / "config.yaml").exists() or not command.running)
    with small_disk(folder, megabytes=1) as disk:
        at_a_random_moment(ground, command, LATER)
        ways = ground.turn.of(("full", "read-only"))
        while command.busy() and len(ground.faults) < MOST_FULL:
            _break_disk(ground, disk, next(ways))
            time.sleep(ground.random.uniform(0.3, 1.5))
        # The run tries its last checkpoint again for half a minute.
        disk.allow()
        disk.empty()
        ends(command, 0)
        finished(ground, reference)


def _break_disk(ground: Ground, disk: Disk, way: str) -> None:
    """Fill the disk or make it read-only. In three of ten cases it stays so."""
    if way == "full":
        disk.fill()
        ground.note_fault("checkpoints' disk full")
    elif disk.protect():
        ground.note_fault("checkpoints' disk read-only")
    time.sleep(ground.random.uniform(0.5, 2.0))
    if ground.random.random() < 0.7:
        disk.allow()
        disk.empty()

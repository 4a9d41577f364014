"""Checkpoints that are damaged, or cannot be written."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from pathlib import Path

from rankzero.tracking.folder import RunFolder
from rankzero.train import checkpoint, manifest
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

DAMAGES_EACH = 4 * len(DAMAGES)
MOST_FULL = 8
"""How often a disk is filled, or made read-only, in one training."""


def damaged_checkpoints(ground: Ground, reference: Curves) -> None:
    """Checkpoints truncated, with flipped bits, foreign, malicious: never executed, the one before is used or none."""
    ground.run("train", TINY, *SETTINGS, "train.keep=3")
    run = the_run(ground)
    whole = ground.folder / "whole"
    shutil.copytree(run.checkpoints, whole)
    for damage in itertools.islice(itertools.cycle(DAMAGES), DAMAGES_EACH):
        newest = _newest(run)
        ground.hurt(f"checkpoint {damage}")
        proof = ground.folder / "executed"
        DAMAGES[damage](newest, ground.random, proof)
        path, _ = checkpoint.newest_intact(run.checkpoints)
        if path is None:
            raise Broken(f"corrupt: after {damage}, no checkpoint is left")
        with contextlib.suppress(manifest.BrokenCheckpoint):
            checkpoint.load(newest)
        if proof.exists():
            raise Broken(f"executed: loading a checkpoint that is {damage} ran its code")
        if damage == "malicious":
            path = sorted(run.checkpoints.glob("step_*"))[-2]
        saved = checkpoint.load(path)
        if saved["step"] != checkpoint.load(whole / path.name)["step"]:
            raise Broken(f"corrupt: after {damage}, {path.name} is another")
        _put_back(run, whole)
    for damage in REFUSED:
        _is_refused(ground, run, damage)
        _put_back(run, whole)
    newest = _newest(run)
    DAMAGES[ground.next_of(("truncated", "bit-flipped", "emptied", "zeroed"))](newest, ground.random, proof)
    ground.run("resume", "run", f"train.steps={STEPS}")
    finished(ground, reference)


def _newest(run: RunFolder) -> Path:
    return sorted(run.checkpoints.glob("step_*"))[-1]


def _put_back(run: RunFolder, whole: Path) -> None:
    shutil.rmtree(run.checkpoints)
    shutil.copytree(whole, run.checkpoints)


def _is_refused(ground: Ground, run: RunFolder, damage: str) -> None:
    """A real resume ends with exit code 1 and words that name the checkpoint; nothing of that is executed."""
    newest, proof = _newest(run), ground.folder / "executed"
    REFUSED[damage](newest, ground.random, proof)
    ground.hurt(f"resume from a checkpoint that is {damage}")
    command = ground.run("resume", "run", f"train.steps={STEPS}", code=1)
    if proof.exists():
        raise Broken(f"executed: a resume from a checkpoint that is {damage} ran its code")
    if newest.name not in command.output.read_text():
        raise Broken(f"wrong: a resume that is refused, {damage}, does not name {newest.name}: {command.tail()}")
    promises.nobody_is_left(ground)
    promises.status_is(run, "FAILED")


def checkpoint_disk(ground: Ground, reference: Curves) -> None:
    """The checkpoints' disk is read-only or full, for a while or to the end: training goes on, what was saved stays."""
    command = ground.start("train", CLOCK, *SLOW, "step_seconds=0.05")
    folder = ground.runs_folder / "run" / "checkpoints"
    wait_for(lambda: (folder.parent / "config.yaml").exists() or not command.running)
    with small_disk(folder, megabytes=1) as disk:
        at_a_random_moment(ground, command, LATER)
        ways = ground.turn.of(("full", "read-only"))
        while command.busy() and len(ground.faults) < MOST_FULL:
            _hurt(ground, disk, next(ways))
            time.sleep(ground.random.uniform(0.3, 1.5))
        ends(command, 0)
        disk.allow()
        disk.empty()
        finished(ground, reference)


def _hurt(ground: Ground, disk: Disk, way: str) -> None:
    """Make the disk read-only, or full, for a while; perhaps it stays so."""
    if way == "full":
        disk.fill()
        ground.hurt("checkpoints' disk full")
    elif disk.protect():
        ground.hurt("checkpoints' disk read-only")
    time.sleep(ground.random.uniform(0.5, 2.0))
    if ground.random.random() < 0.7:
        disk.allow()
        disk.empty()

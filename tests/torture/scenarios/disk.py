"""Full disks, failing disks, and torn journals."""

from __future__ import annotations

import contextlib
import time

import psutil

from torture import promises
from torture.disks import failing_disk as failing
from torture.disks import small_disk
from torture.ground import Ground
from torture.promises import Curves
from torture.scenarios.training import (
    CLOCK,
    LATER,
    SLOW,
    at,
    at_a_random_moment,
    never_began,
    resumes,
    the_run,
)

MOST_FULL = 8
# Ends of a journal after its machine died.
TAILS = {
    "torn": b'{"torn": ',
    "with garbage": b"\xff\xfe\x00garbage\n",
    "with a foreign line": b'["foreign", 1]\n',
    "with empty lines": b"\n\n",
}


def full_disk(ground: Ground, reference: Curves) -> None:
    """Fill the disk: training continues or fails with the reason, and saved data stays intact."""
    with small_disk(ground.runs_folder.parent) as disk:
        command = ground.start("train", CLOCK, *SLOW, "step_seconds=0.05")
        moment, room = at_a_random_moment(ground, command), True
        while command.busy() and len(ground.faults) < MOST_FULL:
            disk.fill()
            ground.note_fault(f"disk full, from {moment} on")
            time.sleep(ground.random.uniform(0.5, 2.0))
            room = ground.random.random() < 0.7
            if room:
                disk.empty()
                room = "rank 0" in ground.roles()
            time.sleep(ground.random.uniform(0.2, 1.0))
        command.wait()
        disk.empty()
        promises.no_process_is_left(ground)
        if moment == "start" and never_began(ground):
            return
        resumes(
            ground,
            reference,
            ("FINISHED",) if room and moment != "start" else ("FINISHED", "FAILED", "KILLED"),
        )


def failing_disk(ground: Ground, reference: Curves) -> None:
    """The kernel makes the disk read-only during the training: data written before stays intact."""
    with failing(ground.runs_folder.parent, ground.folder / "disk.img") as disk:
        command = ground.start("train", CLOCK, *SLOW)
        moment = at_a_random_moment(ground, command)
        if command.running and disk.fail():
            ground.note_fault(f"disk read-only at {moment}")
        command.wait()
        promises.no_process_is_left(ground)
        disk.repair()
        if moment == "start" and never_began(ground):
            return
        resumes(ground, reference, ("FINISHED", "FAILED", "KILLED"))


def torn_journal(ground: Ground, reference: Curves) -> None:
    """A machine dies and leaves a torn journal: intact lines are delivered, and the run resumes."""
    command = ground.start("train", CLOCK, *SLOW)
    moment, tail = ground.next_pair(LATER, tuple(TAILS))
    at(ground, command, moment)
    _kill_all(ground)
    command.wait()
    promises.no_process_is_left(ground)
    run = the_run(ground)
    with run.events.open("ab") as file:
        file.write(TAILS[tail])
    ground.note_fault(f"journal {tail}, all killed at {moment}")
    resumes(ground, reference, ("FAILED", "FINISHED"))


def _kill_all(ground: Ground) -> None:
    """Kill all processes at once, as if the machine had died."""
    # A process that outlives the launcher by long would journal the launcher's end.
    for role, victim in ground.roles().items():
        with contextlib.suppress(psutil.Error):
            victim.kill()
            ground.note_fault(f"SIGKILL of {role}")

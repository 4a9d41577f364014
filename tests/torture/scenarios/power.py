"""Power cuts, and calls on the disk that fail."""

from __future__ import annotations

import contextlib
import itertools
import time

import psutil

from rankzero.events import RunEnded
from rankzero.run_store import delivery_state
from rankzero.run_store.journal import read_all
from torture import promises
from torture.disk_calls import DiskCalls
from torture.ground import Command, Ground, wait_for
from torture.promises import Curves
from torture.room import SHARED_MEMORY, shared_memory
from torture.scenarios.training import (
    CLOCK,
    SLOW,
    STEPS,
    at,
    finished,
    is_consistent,
    resumes,
    the_run,
)

CUTS_EACH = 5
CUTS = (
    "after a checkpoint",
    "with the courier ahead",
    "between steps",
    "at the end",
    "during an upload",
    "during a resume",
)
WAYS = ("dropped", "torn", "zeroed")
# A courier that waits for the journal's sync is never ahead of it.
AHEAD_SECONDS = 4.0
FAILURES = (
    ("write", "EIO"),
    ("write", "ENOSPC"),
    ("write", "EDQUOT"),
    ("write", "EROFS"),
    ("write", "EINTR"),
    ("write", "half"),
    ("sync", "EIO"),
    ("sync", "ENOSPC"),
    ("rename", "EIO"),
    ("rename", "ENOSPC"),
    ("open", "EIO"),
    ("open", "EMFILE"),
    ("open", "EROFS"),
    ("mkdir", "ENOSPC"),
    ("unlink", "EIO"),
)
MOST_FAILURES = 12
MEET_SECONDS = 4.0


def power_cuts(ground: Ground, reference: Curves) -> None:
    """Kill all at once and drop what was not synced: a resume finishes, each step comes once."""
    calls = DiskCalls(ground)
    ground.power_cut = True
    words: tuple[object, ...] = ("train", CLOCK, *SLOW, "step_seconds=0.04")
    moments = itertools.islice(ground.turn.of(CUTS, CUTS_EACH), CUTS_EACH)
    ways = ground.turn.of(WAYS, CUTS_EACH)
    # After the end, a resume has nothing left to train.
    for moment in sorted(moments, key=lambda moment: moment == "at the end"):
        way = next(ways)
        command = ground.start(*words)
        if not _comes(ground, command, calls, moment):
            break
        _kill_at_once(ground)
        command.process.wait()
        promises.no_process_is_left(ground)
        calls.cut(way, ground.random)
        ground.note_fault(f"power cut {moment}, unsynced bytes {way}")
        if not promises.checkpoints_are_intact(the_run(ground)):
            return
        # Sometimes `sync` closes the run before it is resumed.
        if ground.random.random() < 0.5:
            is_consistent(ground, reference, ("FAILED", "FINISHED"))
        words = ("resume", "run", f"train.steps={STEPS}")
    else:
        ground.run(*words)
    command.wait()
    finished(ground, reference)


def _comes(ground: Ground, command: Command, calls: DiskCalls, moment: str) -> bool:
    """Wait for the moment, and for a checkpoint. Return whether the training still runs."""
    resumed, before = ground.the_run() is not None, _checkpoints(ground)
    if moment == "during a resume" and resumed:
        time.sleep(ground.random.uniform(0.5, 5.0))
        return command.running
    wait_for(lambda: not command.running or _checkpoints(ground) > 0)
    match moment:
        case "with the courier ahead":
            wait_for(lambda: not command.running or _is_ahead(ground, calls), AHEAD_SECONDS)
        case "between steps":
            time.sleep(ground.random.uniform(0.0, 3.0))
        case "at the end":
            wait_for(lambda: not command.running or _is_over(ground))
            time.sleep(ground.random.uniform(0.0, 1.0))
        case "during an upload":
            wait_for(lambda: not command.running or _uploads(ground), AHEAD_SECONDS)
        case _:
            wait_for(lambda: not command.running or _checkpoints(ground) > before)
    return command.running


def _checkpoints(ground: Ground) -> int:
    """Return the step of the newest checkpoint, or 0."""
    run = ground.the_run()
    names = [] if run is None else [path.name for path in run.checkpoints.glob("step_*")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


def _is_ahead(ground: Ground, calls: DiskCalls) -> bool:
    """Return whether the courier has delivered lines that a power cut would drop."""
    run = the_run(ground)
    offsets = delivery_state.load(delivery_state.path_of(run, 0)).cursor.offsets
    return offsets.get(run.events.name, 0) > calls.synced_bytes(run.events)


def _uploads(ground: Ground) -> bool:
    state = delivery_state.load(delivery_state.path_of(the_run(ground), 0))
    return bool(state.queue.awaited)


def _is_over(ground: Ground) -> bool:
    return any(isinstance(event, RunEnded) for event in read_all(the_run(ground).events))


def _kill_at_once(ground: Ground) -> None:
    """Kill every process of the job, as a power cut does: none may act on another one's end."""
    for signal_all in (psutil.Process.suspend, psutil.Process.suspend, psutil.Process.kill):
        for process in ground.processes():
            with contextlib.suppress(psutil.Error):
                signal_all(process)
    for name in shared_memory() - ground.shared_memory:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def failing_calls(ground: Ground, reference: Curves) -> None:
    """Calls on the run's disk fail for a moment: saved data stays, and the run ends truly."""
    calls = DiskCalls(ground)
    command = ground.start("train", CLOCK, *SLOW, "step_seconds=0.06")
    failures = ground.turn.of(FAILURES, MOST_FAILURES)
    # A command that cannot write at its start ends with an error and begins no run.
    at(ground, command, "step")
    while command.busy() and len(ground.faults) < MOST_FAILURES:
        time.sleep(ground.random.uniform(0.1, 1.0))
        call, error = next(failures)
        calls.fail(call, error, ground.random.randrange(1, 6))
        wait_for(lambda: not command.running or calls.met > 0, MEET_SECONDS)
        time.sleep(ground.random.uniform(0.0, 0.5))
        if calls.allow():
            ground.note_fault(f"{call} fails with {error}")
    command.wait()
    promises.no_process_is_left(ground)
    resumes(ground, reference, ("FINISHED", "FAILED", "KILLED"))

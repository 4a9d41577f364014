"""Killed processes and stopped processes."""

from __future__ import annotations

import contextlib
import time

import psutil

from rankzero.catalog.lookup import last_end
from rankzero.training.distributed.watchdog import WAITING_FACTOR
from torture import promises
from torture.ground import Broken, Ground, wait_for
from torture.promises import Curves
from torture.scenarios.training import (
    CLOCK,
    GATHERED,
    IMAGED,
    LATER,
    LOADED,
    MOMENTS,
    SETTINGS,
    SLOW,
    TINY,
    at,
    at_a_random_moment,
    ends,
    finished,
    finished_without_sync,
    kill,
    never_began,
    resumes,
    the_run,
)

ROLES = ("rank 0", "other rank", "recorder", "courier")
LAUNCHING = ("launcher", "server")
MOST_KILLS, MOST_STOPS = 12, 16
HANG_SECONDS = 6.0
# Until torchrun's agent has ended the other ranks on a busy machine. It sends SIGTERM first and
# SIGKILL later.
AGENT_SECONDS = 60.0
AFTER_SECONDS = 90.0


def killed_ranks(ground: Ground, reference: Curves) -> None:
    """Kill ranks, the recorder and the courier repeatedly: the training restarts and finishes.

    Every second time, processes load the data. They must end with their ranks, and leave no shared
    memory. Some of them are killed, too.
    """
    data = ground.next_of((GATHERED, LOADED))
    command = ground.start("train", IMAGED, *SETTINGS, *data, "--max-restarts", 50)
    roles = ground.turn.of((*ROLES, "data worker") if data else ROLES, MOST_KILLS)
    while command.busy() and len(ground.faults) < MOST_KILLS:
        time.sleep(ground.random.uniform(0.2, 3.0))
        kill(ground, next(roles))
    ends(command, 0)
    finished(ground, reference)
    promises.pictures_are_there(ground, the_run(ground))


def killed_launcher(ground: Ground, reference: Curves) -> None:
    """Kill the command or the ranks' fork server: the ranks end, and the run can resume."""
    command = ground.start("train", CLOCK, *SLOW, *ground.random.choice((GATHERED, LOADED)))
    moment, role = ground.next_pair(MOMENTS, LAUNCHING)
    at(ground, command, moment)
    kill(ground, role, f" at {moment}")
    command.wait()
    promises.no_process_is_left(ground)
    if moment == "start":
        if never_began(ground):
            return
    else:
        promises.delivered_without_sync(the_run(ground))
    resumes(ground, reference, ("KILLED", "FAILED", "FINISHED"))


def courier_killed_during_uploads(ground: Ground, reference: Curves) -> None:
    """Kill the courier during uploads: another one takes over, and sends nothing twice."""
    command = ground.start("train", IMAGED, *SETTINGS, "step_seconds=0.05")
    while command.busy() and len(ground.faults) < 3:
        at_a_random_moment(ground, command, ("upload",))
        kill(ground, "courier", " during uploads")
        wait_for(lambda: not command.running or "courier" in ground.roles(), 10.0)
    ends(command, 0)
    finished_without_sync(ground, reference)
    promises.pictures_are_there(ground, the_run(ground))


def stopped_ranks(ground: Ground, reference: Curves) -> None:
    """Stop and continue processes, as a debugger or a closed laptop does: that costs only time."""
    command = ground.start("train", TINY, *SETTINGS, "step_seconds=0.08")
    roles = ground.turn.of((*ROLES, "launcher"), MOST_STOPS)
    while command.busy() and len(ground.faults) < MOST_STOPS:
        time.sleep(ground.random.uniform(0.2, 1.5))
        _pause(ground, next(roles))
    ends(command, 0)
    finished_without_sync(ground, reference)


def _pause(ground: Ground, role: str) -> None:
    victim = ground.roles().get(role)
    if victim is not None:
        with contextlib.suppress(psutil.Error):
            victim.suspend()
            ground.note_fault(f"SIGSTOP of {role} for a while")
            time.sleep(ground.random.uniform(0.1, 1.5))
            victim.resume()


def stopped_for_ever(ground: Ground, reference: Curves) -> None:
    """Stop a rank for ever: the run fails in bounded time, names the rank, and can be resumed.

    A rank that is stopped after its work fails nothing.
    """
    # After the last step, the limit is half an hour by default.
    ground.environ["RANKZERO_SETUP_SECONDS"] = str(AFTER_SECONDS)
    command = ground.start("train", CLOCK, *SLOW, f"train.limits.hang_minutes={HANG_SECONDS / 60}")
    moment, role = ground.next_pair(LATER, ("rank 0", "other rank"))
    at(ground, command, moment)
    victim = ground.roles().get(role)
    if victim is None:
        # The training ended before the fault, so none is counted.
        ends(command, 0)
        return
    victim.suspend()
    ground.note_fault(f"SIGSTOP of {role} for ever at {moment}")
    began = time.monotonic()
    code = command.wait()
    if code == 0:
        finished_without_sync(ground, reference)
        return
    if code != 1:
        raise Broken(f"wrong status: exit code {code}, wanted 1: {command.tail()}")
    if time.monotonic() - began > HANG_SECONDS * WAITING_FACTOR + AGENT_SECONDS:
        raise Broken(f"hang: the run waited {time.monotonic() - began:.0f} s for a stopped rank")
    promises.no_process_is_left(ground)
    promises.delivered_without_sync(the_run(ground))
    _is_named(ground, 0 if role == "rank 0" else 1)
    resumes(ground, reference, ("FAILED",))


def _is_named(ground: Ground, rank: int) -> None:
    ended = last_end(the_run(ground))
    if ended is None or f"rank {rank} is stopped" not in ended.reason:
        raise Broken(
            f"wrong: rank {rank} was stopped, and the reason is {ended and ended.reason!r}"
        )

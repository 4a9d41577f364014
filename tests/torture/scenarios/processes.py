"""Processes are killed, stopped, told to end."""

from __future__ import annotations

import contextlib
import signal
import time

import psutil

from rankzero.tracking.catalog import last_end
from rankzero.train.watchdog import OTHERS
from torture import promises
from torture.ground import Broken, Ground
from torture.promises import Losses
from torture.scenarios.training import (
    IMAGED,
    SETTINGS,
    TINY,
    at_a_random_moment,
    ends,
    finished,
    goes_on,
    kill,
    the_run,
)

HANG_SECONDS = 6.0
AGENT_SECONDS = 60.0
"""What torchrun's agent, which asks first and kills later, and a busy machine may take to end the other ranks."""


def killed_ranks(ground: Ground, reference: Losses) -> None:
    """SIGKILL of ranks, of the recorder, of the courier, again and again: the training restarts and gets to its end."""
    command = ground.start("train", IMAGED, *SETTINGS, "--max-restarts", 50)
    while command.running and len(ground.faults) < 6:
        time.sleep(ground.random.uniform(0.2, 3.0))
        kill(ground, ground.random.choice(("rank 0", "other rank", "recorder", "courier")))
    ends(command, 0)
    finished(ground, reference)
    promises.pictures_are_there(ground, the_run(ground))


def killed_launcher(ground: Ground, reference: Losses) -> None:
    """SIGKILL of the command, or of the server that ranks are forked from: the ranks end, the run goes on later."""
    command = ground.start("train", TINY, *SETTINGS)
    at_a_random_moment(ground, command)
    kill(ground, ground.random.choice(("launcher", "server")))
    command.wait()
    promises.nobody_is_left(ground)
    goes_on(ground, reference, ("KILLED", "FAILED", "FINISHED"))


def signals(ground: Ground, reference: Losses) -> None:
    """SIGTERM, SIGINT, SIGUSR1 or SIGHUP, once or twice, to the command or to a rank: stopped with a checkpoint."""
    command = ground.start("train", TINY, *SETTINGS)
    at_a_random_moment(ground, command)
    number = ground.random.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP))
    target = ground.random.choice(("launcher", "launcher", "rank 0", "other rank"))
    for _ in range(ground.random.choice((1, 1, 2))):
        victim = ground.roles().get(target)
        if victim is not None:
            with contextlib.suppress(psutil.Error):
                victim.send_signal(number)
                ground.hurt(f"{number.name} to {target}")
        time.sleep(ground.random.uniform(0, 0.3))
    command.wait()
    promises.nobody_is_left(ground)
    goes_on(ground, reference, ("KILLED", "FAILED", "FINISHED"))


def stopped_ranks(ground: Ground, reference: Losses) -> None:
    """A process is stopped and continued, as a debugger or a laptop's lid does: a straggler costs time only."""
    command = ground.start("train", TINY, *SETTINGS)
    while command.running and len(ground.faults) < 5:
        time.sleep(ground.random.uniform(0.2, 1.5))
        victim = ground.roles().get(ground.random.choice(("rank 0", "other rank", "recorder", "courier", "launcher")))
        if victim is not None:
            with contextlib.suppress(psutil.Error):
                victim.suspend()
                ground.hurt("SIGSTOP")
                time.sleep(ground.random.uniform(0.1, 1.5))
                victim.resume()
    ends(command, 0)
    finished(ground, reference)


def stopped_for_ever(ground: Ground, reference: Losses) -> None:
    """A rank is stopped and never continued: the run fails in bounded time, says which rank, and goes on without it."""
    command = ground.start("train", TINY, *SETTINGS, f"train.hang_minutes={HANG_SECONDS / 60}")
    at_a_random_moment(ground, command, earliest="step")
    role = ground.random.choice(("rank 0", "other rank"))
    victim = ground.roles().get(role)
    if victim is None:
        raise Broken(f"error: there is no {role} to be stopped")
    victim.suspend()
    ground.hurt(f"SIGSTOP of {role} for ever")
    began = time.monotonic()
    ends(command, 1)
    if time.monotonic() - began > HANG_SECONDS * OTHERS + AGENT_SECONDS:
        raise Broken(f"hang: a stopped rank held the run up for {time.monotonic() - began:.0f} s")
    promises.nobody_is_left(ground)
    _is_named(ground, 0 if role == "rank 0" else 1)
    goes_on(ground, reference, ("FAILED",))


def _is_named(ground: Ground, rank: int) -> None:
    ended = last_end(the_run(ground))
    if ended is None or f"rank {rank} is stopped" not in ended.reason:
        raise Broken(f"wrong: rank {rank} was stopped, and the reason is {ended and ended.reason!r}")

"""The training that scenarios hurt: how it is started, hit at random moments, and what it must come to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from rankzero.tracking.folder import RunFolder
from torture import promises
from torture.ground import Broken, Command, Ground, wait_for
from torture.promises import Losses

TINY = Path(__file__).parents[2] / "fixtures" / "tiny.py"
IMAGED = TINY.with_name("imaged.py")
CLOCK = TINY.with_name("clocked.py")
STEPS = 200
SETTINGS = (
    "--run-name", "run", "--nproc", 2, "step_seconds=0.01", "dropout=0.2", f"train.steps={STEPS}", "train.log_every=4",
    "train.eval_every=20", "train.keep=2",
)  # fmt: skip
Scenario = Callable[[Ground, Losses], None]


def kill(ground: Ground, role: str) -> None:
    victim = ground.roles().get(role)
    if victim is not None:
        with contextlib.suppress(psutil.Error):
            victim.kill()
            ground.hurt(f"SIGKILL of {role}")


def kill_one_of(ground: Ground, role: str) -> bool:
    """Kill one of many processes that are alike, once there is one; return whether there was."""
    if not wait_for(lambda: role in ground.roles()):
        return False
    before = len(ground.faults)
    time.sleep(ground.random.uniform(0.0, 3.0))
    kill(ground, role)
    return len(ground.faults) > before


def at_a_random_moment(ground: Ground, command: Command, earliest: str = "start") -> None:
    """Wait for a moment of the training: its start, a step, a checkpoint, its end."""
    moment = ground.random.choice([one for one in ("start", "step", "checkpoint", "end") if earliest in ("start", one)])

    def reached() -> bool:
        run = ground.the_run()
        if not command.running:
            return True
        if run is None or not run.events.exists():
            return False
        steps = promises.journaled(run)
        if moment == "end":
            return len(steps) >= STEPS - 8
        return len(steps) >= 4 if moment == "step" else any(run.checkpoints.glob("*step_*"))

    if moment != "start":
        wait_for(reached)
    time.sleep(ground.random.uniform(0, 4.0 if moment == "start" else 1.5))


def the_run(ground: Ground) -> RunFolder:
    run = ground.the_run()
    if run is None:
        raise Broken("lost: there is no run")
    return run


def ends(command: Command, code: int) -> None:
    found = command.wait()
    if found != code:
        raise Broken(f"wrong status: exit code {found}, wanted {code}: {command.tail()}")


def finished(ground: Ground, reference: Losses) -> None:
    """Nobody is left, everything is in MLflow, the run has finished."""
    promises.nobody_is_left(ground)
    run = the_run(ground)
    promises.nothing_is_lost(run, reference, steps=STEPS)
    promises.status_is(run, "FINISHED")
    promises.checkpoint_is_intact(run)


def goes_on(ground: Ground, reference: Losses, allowed: tuple[str, ...]) -> None:
    """What there is of the run is true and whole; it goes on to the end of a training that nobody disturbed."""
    run = ground.the_run()
    if run is None or not run.events.exists():  # ended before it began: nothing to be true of
        return
    promises.nothing_is_lost(run, reference)
    status = promises.status_is(run, *allowed)
    step = promises.checkpoint_is_intact(run)
    if status != "FINISHED" and step:
        ground.run("resume", run.path.name)
        finished(ground, reference)

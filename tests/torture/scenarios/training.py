"""The training that scenarios use: how to start it, wait for a moment of it, and check its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from rankzero.run_store import delivery_state
from rankzero.run_store.folder import RunFolder
from support.stores import list_runs
from torture import promises
from torture.ground import Broken, Command, Ground, wait_for
from torture.promises import Curves

TINY = Path(__file__).parents[2] / "fixtures" / "tiny.py"
IMAGED = TINY.with_name("imaged.py")
CLOCK = TINY.with_name("clocked.py")
STEPS = 200
# Steps from one evaluation to the next.
EVERY = 20
MOMENTS = ("start", "step", "evaluation", "checkpoint", "upload", "end")
LATER, BEFORE_THE_END = MOMENTS[1:], MOMENTS[1:-1]
# Moments that pass at once, so a scenario must not wait longer.
SHORT = ("evaluation", "upload")
# The length of a batch of an evaluation during which a fault occurs, on both ranks.
EVALUATION_SECONDS = 0.3
SETTINGS = (
    *("--run-name", "run", "--nproc", 2, "step_seconds=0.01", "dropout=0.2"),
    *(f"train.steps={STEPS}", "train.log_every=4", f"train.eval_every={EVERY}"),
    *("train.checkpoints.keep=2", "train.mlflow.log_pictures=true"),
)
# Only `CLOCK` has this setting.
SLOW = (*SETTINGS, f"evaluation_seconds={EVALUATION_SECONDS}")
# Data in the rank's own memory, or from two data workers per rank, and two more for evaluations.
GATHERED, LOADED = (), ("listed=true", "train.workers=2")
Scenario = Callable[[Ground, Curves], None]


def kill(ground: Ground, role: str, when: str = "") -> None:
    victim = ground.roles().get(role)
    if victim is not None:
        with contextlib.suppress(psutil.Error):
            victim.kill()
            ground.note_fault(f"SIGKILL of {role}{when}")


def kill_one_of(ground: Ground, role: str) -> bool:
    """Wait for a process of this role and kill it. Return whether there was one."""
    if not wait_for(lambda: role in ground.roles()):
        return False
    before = len(ground.faults)
    time.sleep(ground.random.uniform(0.0, 3.0))
    kill(ground, role)
    return len(ground.faults) > before


def at_a_random_moment(ground: Ground, command: Command, moments: Sequence[str] = MOMENTS) -> str:
    """Wait for the moment whose turn it is in the campaign, as `at` does. Return the moment."""
    moment = ground.next_of(moments)
    at(ground, command, moment)
    return moment


def at(ground: Ground, command: Command, moment: str) -> None:
    """Wait for a moment of the training, and a random time longer unless the moment is short."""
    if moment != "start":
        wait_for(lambda: not command.running or _reached(ground, moment))
    if moment not in SHORT:
        time.sleep(ground.random.uniform(0, 4.0 if moment == "start" else 1.5))


def _reached(ground: Ground, moment: str) -> bool:
    run = ground.the_run()
    if run is None or not run.events.exists():
        return False
    match moment:
        case "checkpoint":
            return any(run.checkpoints.glob("*step_*"))
        case "upload":
            return bool(delivery_state.load(delivery_state.path_of(run, 0)).queue.awaited)
        case "evaluation":
            return _is_evaluating(ground)
    return len(promises.journaled(run)) >= (STEPS - 8 if moment == "end" else 4)


def _is_evaluating(ground: Ground) -> bool:
    """Return whether an evaluation has begun and cannot have ended yet."""
    try:
        return time.time() - ground.evaluating.stat().st_mtime < EVALUATION_SECONDS
    except FileNotFoundError:
        return False


def the_run(ground: Ground) -> RunFolder:
    run = ground.the_run()
    if run is None:
        raise Broken("lost: there is no run")
    return run


def named(ground: Ground) -> tuple[object, ...]:
    """Return settings with a unique run name, because scenarios share the campaign's server."""
    return ("--run-name", f"run-{ground.mark}", *SETTINGS[2:])


def ends(command: Command, code: int) -> None:
    found = command.wait()
    if found != code:
        raise Broken(f"wrong status: exit code {found}, wanted {code}: {command.tail()}")


def finished(ground: Ground, reference: Curves) -> None:
    """Check that the run is FINISHED and whole, also in MLflow, and that no process is left."""
    promises.no_process_is_left(ground)
    run = the_run(ground)
    promises.nothing_is_lost(
        run, reference, steps=STEPS, ignored=ground.spoiled, power_cut=ground.power_cut
    )
    promises.status_is(run, "FINISHED")
    promises.checkpoints_are_intact(run)
    # The campaign checks this again, but some disks are gone by then.
    promises.no_traceback_is_printed(ground)


def finished_without_sync(ground: Ground, reference: Curves) -> None:
    """Check the same as `finished`, and that the delivery needed no `sync`."""
    promises.no_process_is_left(ground)
    promises.delivered_without_sync(the_run(ground))
    finished(ground, reference)


def never_began(ground: Ground) -> bool:
    """Return whether the fault came before there was a run. MLflow must have none either then."""
    run = ground.the_run()
    if run is not None and run.events.exists():
        return False
    names = [record.name for record in list_runs(ground.store)]
    if names:
        raise Broken(f"lost: MLflow has {names}, but there is no journal")
    return True


def is_consistent(
    ground: Ground, reference: Curves, allowed: tuple[str, ...], spoiled: int | None = None
) -> str:
    """Check that the part of the run so far is whole. Return its status, one of `allowed`."""
    run = the_run(ground)
    if not run.events.exists():
        raise Broken("lost: the run has no journal")
    promises.nothing_is_lost(
        run, reference, spoiled=spoiled, ignored=ground.spoiled, power_cut=ground.power_cut
    )
    if spoiled is not None:
        ground.spoiled.update(range(spoiled, max(promises.journaled(run)) + 1))
    promises.checkpoints_are_intact(run)
    promises.no_traceback_is_printed(ground)
    status = promises.status_is(run, *allowed)
    if status == "FINISHED" and len(promises.journaled(run)) < STEPS:
        raise Broken(
            f"wrong status: FINISHED after {len(promises.journaled(run))} of {STEPS} steps"
        )
    return status


def resumes(
    ground: Ground,
    reference: Curves,
    allowed: tuple[str, ...],
    spoiled: int | None = None,
    settings: tuple[str, ...] = (),
) -> None:
    """Check that the part of the run so far is whole, and that a resume finishes it undisturbed."""
    status = is_consistent(ground, reference, allowed, spoiled)
    run = the_run(ground)
    if status != "FINISHED" and promises.checkpoints_are_intact(run):
        ground.run("resume", run.path.name, *settings)
        finished(ground, reference)

"""Processes are told to end: in the middle of a training, where what must come is known, and at its edges."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import time

import psutil

from rankzero.catalog.lookup import last_end
from rankzero.errors import FAILED, FINISHED, RESUMABLE
from rankzero.events import RunStarted
from rankzero.run_store.journal import read_all
from torture import promises
from torture.ground import Broken, Command, Ground, wait_for
from torture.promises import Curves
from torture.proxy import Proxy
from torture.scenarios.training import (
    CLOCK,
    SETTINGS,
    STEPS,
    TINY,
    ends,
    finished,
    finished_by_itself,
    goes_on,
    named,
    stands,
    the_run,
)

STOP_SECONDS = 30.0
"""What a command may take to end once it was told to, its delivery included."""
FURTHEST = 40
"""Steps of an attempt after which it is told to stop, at most: far from the end after two of them."""
TRAIN = ("train", CLOCK, *SETTINGS, "step_seconds=0.03")
EVALUATION_SECONDS = 4.0
"""What a batch of an evaluation takes that is to be left. Each rank has two."""
CODES = {"FINISHED": (FINISHED,), "KILLED": (RESUMABLE, FAILED), "FAILED": (FAILED,)}
"""What a command's exit code says of its run. KILLED is 75 where there is a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Blow:
    """A signal to one of a training's processes, once or twice, and what else the command was told."""

    number: signal.Signals
    target: str = "launcher"
    times: int = 1
    words: tuple[object, ...] = ()
    evaluating: bool = False

    @property
    def told(self) -> str:
        """Return what the fault is called."""
        twice = " twice" if self.times > 1 else ""
        amid = " amid an evaluation" if self.evaluating else ""
        return f"{self.number.name}{twice} to {self.target}{' that would restart' if self.words else ''}{amid}"

    @property
    def settings(self) -> tuple[str]:
        """Return what the run is told, so that there is a moment for this."""
        return (f"evaluation_seconds={EVALUATION_SECONDS if self.evaluating else 0.0}",)


def at_both_moments(*blows: Blow) -> tuple[Blow, ...]:
    """Return the same blows amid steps and amid evaluations."""
    return tuple(
        dataclasses.replace(blow, evaluating=amid) for blow in blows for amid in (False, True)
    )


ONCE = at_both_moments(
    Blow(signal.SIGTERM),
    Blow(signal.SIGINT),
    Blow(signal.SIGHUP),
    Blow(signal.SIGUSR1),
    Blow(signal.SIGTERM, "rank 0"),
    Blow(signal.SIGINT, "rank 0"),
    Blow(signal.SIGUSR1, "rank 0"),
    Blow(signal.SIGTERM, "other rank"),
    Blow(signal.SIGINT, "other rank"),
    Blow(signal.SIGHUP, "other rank"),
    Blow(signal.SIGUSR1, "other rank"),
)
TWICE = at_both_moments(
    Blow(signal.SIGTERM, times=2),
    Blow(signal.SIGINT, times=2),
    Blow(signal.SIGUSR1, "rank 0", times=2),
    Blow(signal.SIGTERM, "rank 0", times=2),
    Blow(signal.SIGHUP, "other rank", times=2),
    Blow(signal.SIGTERM, times=2, words=("--max-restarts", 3)),
    Blow(signal.SIGINT, times=2, words=("--max-restarts", 3)),
)
EDGES = (Blow(signal.SIGTERM), Blow(signal.SIGINT), Blow(signal.SIGHUP), Blow(signal.SIGUSR1))


def signals(ground: Ground, reference: Curves) -> None:
    """One signal amid the training, to command or rank: 75, KILLED, a checkpoint of that step, resumed exactly."""
    words: tuple[object, ...] = TRAIN
    for blow in itertools.islice(ground.turn.of(ONCE, 2), 2):
        command = ground.start(*words, *blow.settings)
        _amid(ground, command, blow)
        _strike(ground, blow)
        _ends_soon(command, RESUMABLE)
        _stopped_where_it_was(ground, reference)
        words = ("resume", "run")
    ground.run(*words, "evaluation_seconds=0")
    finished_by_itself(ground, reference)


def signals_twice(ground: Ground, reference: Curves) -> None:
    """Two signals amid the training: it ends fast, says truly how, is not begun again, and goes on when told to."""
    blow = ground.next_of(TWICE)
    command = ground.start(*TRAIN, *blow.settings, *blow.words)
    _amid(ground, command, blow)
    _strike(ground, blow)
    _ends_soon(command, *CODES["KILLED"])
    promises.nobody_is_left(ground)
    status = stands(ground, reference, ("KILLED", "FAILED"))
    if command.wait() not in CODES[status]:
        raise Broken(
            f"wrong status: exit code {command.wait()} of a run that is {status}: {command.tail()}"
        )
    _was_begun_once(ground)
    goes_on(ground, reference, (status,), settings=("evaluation_seconds=0",))


def early_signals(ground: Ground, reference: Curves) -> None:
    """A signal while the ranks start: the command ends and trains no further, whether there is a run by then or not."""
    blow = ground.next_of(EDGES)
    command = ground.start(*TRAIN)
    wait_for(lambda: not command.running or "server" in ground.roles())
    time.sleep(ground.random.uniform(0.0, 4.0))
    if _steps(ground):
        ends(command, FINISHED)  # too late to be early: no fault, none counted
        return
    _strike(ground, blow, "while ranks start")
    code = _ends_soon(command, *CODES["KILLED"], -blow.number)
    promises.nobody_is_left(ground)
    run = ground.the_run()
    if run is None or not run.events.exists():
        return
    status = stands(ground, reference, ("KILLED", "FAILED"))
    if code not in (*CODES[status], -blow.number):
        raise Broken(f"wrong status: exit code {code} of a run that is {status}: {command.tail()}")


def late_signals(ground: Ground, reference: Curves) -> None:
    """A signal once the ranks are gone, while the command waits for the delivery: it has finished, and says so.

    A server that is slow from the last steps on has it wait for long enough to be told something.
    """
    blow = ground.next_of(EDGES)
    with Proxy(ground.environ["TORTURE_SERVER"]) as proxy:
        command = ground.start(
            "train", TINY, *named(ground), "step_seconds=0.03", "--tracking-uri", proxy.uri
        )
        wait_for(lambda: not command.running or _steps(ground) > STEPS - FURTHEST)
        proxy.misbehave("slow")
        wait_for(
            lambda: not command.running or (_has_ended(ground) and "rank 0" not in ground.roles())
        )
        time.sleep(ground.random.uniform(0.6, 1.5))  # the agent looks for them every half second
        if command.running:
            _strike(ground, blow, "after the training")
        _ends_soon(command, FINISHED)
        proxy.behave()
        promises.nobody_is_left(ground)
        ground.run("sync")
        finished(ground, reference)


def _amid(ground: Ground, command: Command, blow: Blow) -> None:
    """Wait for a moment to strike at: an evaluation that has just begun, or some step."""
    if not blow.evaluating:
        _amid_the_training(ground, command)
        return
    ground.evaluating.unlink(missing_ok=True)
    if (
        not wait_for(lambda: not command.running or ground.evaluating.exists())
        or not command.running
    ):
        raise Broken(f"error: no evaluation was to be seen: {command.tail()}")
    time.sleep(ground.random.uniform(0.0, 0.9 * EVALUATION_SECONDS))


def _amid_the_training(ground: Ground, command: Command) -> None:
    """Wait until some more steps are journaled, of 200 that take half a minute together with what comes before."""
    wanted = _steps(ground) + ground.random.randrange(4, FURTHEST)
    if not wait_for(lambda: not command.running or _steps(ground) >= wanted) or not command.running:
        raise Broken(f"error: step {wanted} was not to be seen: {command.tail()}")


def _steps(ground: Ground) -> int:
    run = ground.the_run()
    return 0 if run is None or not run.events.exists() else max(promises.journaled(run), default=0)


def _has_ended(ground: Ground) -> bool:
    run = ground.the_run()
    return run is not None and run.events.exists() and last_end(run) is not None


def _strike(ground: Ground, blow: Blow, when: str = "") -> None:
    victim = ground.roles().get(blow.target)
    if victim is None:
        raise Broken(f"error: there is no {blow.target} to be told")
    for number in range(blow.times):
        time.sleep(ground.random.uniform(0.0, 0.5) if number else 0.0)
        with contextlib.suppress(psutil.Error):
            victim.send_signal(blow.number)
    ground.hurt(f"{blow.told} {when}".strip())


def _ends_soon(command: Command, *codes: int) -> int:
    """The command ends, with one of these codes."""
    began = time.monotonic()
    code = command.wait()
    took = time.monotonic() - began
    if code not in codes:
        raise Broken(
            f"wrong status: exit code {code}, wanted {' or '.join(map(str, codes))}: {command.tail()}"
        )
    if took > STOP_SECONDS:
        raise Broken(f"hang: the command ended {took:.0f} s after it was told to: {command.tail()}")
    return code


def _stopped_where_it_was(ground: Ground, reference: Curves) -> None:
    """The run is KILLED, says by what, and its newest checkpoint is of the last step that it has told of."""
    promises.nobody_is_left(ground)
    run = the_run(ground)
    promises.arrived_by_itself(run)
    stands(ground, reference, ("KILLED",))
    step, last, ended = (
        promises.checkpoints_are_intact(run),
        max(promises.journaled(run), default=0),
        last_end(run),
    )
    if step != last or last in (0, STEPS):
        raise Broken(f"lost: stopped at step {last}, the newest checkpoint is of step {step}")
    if ended is None or not ended.reason.startswith("stopped by "):
        raise Broken(
            f"wrong: the run was told to stop, and its reason is {ended and ended.reason!r}"
        )


def _was_begun_once(ground: Ground) -> None:
    begun = sum(isinstance(event, RunStarted) for event in read_all(the_run(ground).events))
    if begun != 1:
        raise Broken(f"wrong: told to stop, the training was begun {begun} times")

"""Signals that stop a run: during the training, while it starts, and after its last step."""

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
    finished_without_sync,
    is_consistent,
    named,
    resumes,
    the_run,
)

# Until a command has ended after a signal, with its delivery.
STOP_SECONDS = 30.0
# At most this many steps of an attempt before a signal, so that two attempts stay far from the end.
FURTHEST = 40
TRAIN = ("train", CLOCK, *SETTINGS, "step_seconds=0.03")
# The length of a batch of an evaluation that a signal interrupts. Each rank has two batches.
EVALUATION_SECONDS = 4.0
# A command's exit codes by the status of its run. KILLED is 75 if there is a checkpoint.
CODES = {"FINISHED": (FINISHED,), "KILLED": (RESUMABLE, FAILED), "FAILED": (FAILED,)}


@dataclasses.dataclass(frozen=True)
class SignalFault:
    """A signal to one of a training's processes, once or twice, and options of its command."""

    number: signal.Signals
    target: str = "launcher"
    times: int = 1
    words: tuple[object, ...] = ()
    evaluating: bool = False

    @property
    def label(self) -> str:
        """The name of the fault in reports."""
        twice = " twice" if self.times > 1 else ""
        moment = " during an evaluation" if self.evaluating else ""
        restarting = " that would restart" if self.words else ""
        return f"{self.number.name}{twice} to {self.target}{restarting}{moment}"

    @property
    def settings(self) -> tuple[str]:
        """Settings that make an evaluation long enough for the signal."""
        return (f"evaluation_seconds={EVALUATION_SECONDS if self.evaluating else 0.0}",)


def at_both_moments(*faults: SignalFault) -> tuple[SignalFault, ...]:
    """Return the same faults, during steps and during evaluations."""
    return tuple(
        dataclasses.replace(fault, evaluating=evaluating)
        for fault in faults
        for evaluating in (False, True)
    )


ONCE = at_both_moments(
    SignalFault(signal.SIGTERM),
    SignalFault(signal.SIGINT),
    SignalFault(signal.SIGHUP),
    SignalFault(signal.SIGUSR1),
    SignalFault(signal.SIGTERM, "rank 0"),
    SignalFault(signal.SIGINT, "rank 0"),
    SignalFault(signal.SIGUSR1, "rank 0"),
    SignalFault(signal.SIGTERM, "other rank"),
    SignalFault(signal.SIGINT, "other rank"),
    SignalFault(signal.SIGHUP, "other rank"),
    SignalFault(signal.SIGUSR1, "other rank"),
)
TWICE = at_both_moments(
    SignalFault(signal.SIGTERM, times=2),
    SignalFault(signal.SIGINT, times=2),
    SignalFault(signal.SIGUSR1, "rank 0", times=2),
    SignalFault(signal.SIGTERM, "rank 0", times=2),
    SignalFault(signal.SIGHUP, "other rank", times=2),
    SignalFault(signal.SIGTERM, times=2, words=("--max-restarts", 3)),
    SignalFault(signal.SIGINT, times=2, words=("--max-restarts", 3)),
)
EDGES = (
    SignalFault(signal.SIGTERM),
    SignalFault(signal.SIGINT),
    SignalFault(signal.SIGHUP),
    SignalFault(signal.SIGUSR1),
)


def signals(ground: Ground, reference: Curves) -> None:
    """Send one signal: exit code 75, KILLED, a checkpoint of the last step, an exact resume."""
    words: tuple[object, ...] = TRAIN
    for fault in itertools.islice(ground.turn.of(ONCE, 2), 2):
        command = ground.start(*words, *fault.settings)
        _wait_for_moment(ground, command, fault)
        _send(ground, fault)
        _ends_soon(command, RESUMABLE)
        _stopped_where_it_was(ground, reference)
        words = ("resume", "run")
    ground.run(*words, "evaluation_seconds=0")
    finished_without_sync(ground, reference)


def signals_twice(ground: Ground, reference: Curves) -> None:
    """Send two signals: the run ends fast with a true status, does not restart, and can resume."""
    fault = ground.next_of(TWICE)
    command = ground.start(*TRAIN, *fault.settings, *fault.words)
    _wait_for_moment(ground, command, fault)
    _send(ground, fault)
    _ends_soon(command, *CODES["KILLED"])
    promises.no_process_is_left(ground)
    status = is_consistent(ground, reference, ("KILLED", "FAILED"))
    if command.wait() not in CODES[status]:
        raise Broken(
            f"wrong status: exit code {command.wait()} of a run that is {status}: {command.tail()}"
        )
    _began_once(ground)
    resumes(ground, reference, (status,), settings=("evaluation_seconds=0",))


def early_signals(ground: Ground, reference: Curves) -> None:
    """Send a signal while the ranks start: the command ends, and nothing trains."""
    fault = ground.next_of(EDGES)
    command = ground.start(*TRAIN)
    wait_for(lambda: not command.running or "server" in ground.roles())
    time.sleep(ground.random.uniform(0.0, 4.0))
    if _steps(ground):
        # The training has begun, so this is no early signal and counts as no fault.
        ends(command, FINISHED)
        return
    _send(ground, fault, "while ranks start")
    code = _ends_soon(command, *CODES["KILLED"], -fault.number)
    promises.no_process_is_left(ground)
    run = ground.the_run()
    if run is None or not run.events.exists():
        return
    status = is_consistent(ground, reference, ("KILLED", "FAILED"))
    if code not in (*CODES[status], -fault.number):
        raise Broken(f"wrong status: exit code {code} of a run that is {status}: {command.tail()}")


def late_signals(ground: Ground, reference: Curves) -> None:
    """Send a signal while the command waits for the delivery: the run is FINISHED."""
    # The server is slow from the last steps on, so that the command waits long enough for a signal.
    fault = ground.next_of(EDGES)
    with Proxy(ground.environ["TORTURE_SERVER"]) as proxy:
        command = ground.start(
            "train", TINY, *named(ground), "step_seconds=0.03", "--tracking-uri", proxy.uri
        )
        wait_for(lambda: not command.running or _steps(ground) > STEPS - FURTHEST)
        proxy.misbehave("slow")
        wait_for(
            lambda: not command.running or (_has_ended(ground) and "rank 0" not in ground.roles())
        )
        # The launcher looks every half second whether the ranks have ended.
        time.sleep(ground.random.uniform(0.6, 1.5))
        if command.running:
            _send(ground, fault, "after the training")
        _ends_soon(command, FINISHED)
        proxy.behave()
        promises.no_process_is_left(ground)
        ground.run("sync")
        finished(ground, reference)


def _wait_for_moment(ground: Ground, command: Command, fault: SignalFault) -> None:
    """Wait for the moment of the signal: during an evaluation, or after some steps."""
    if not fault.evaluating:
        _wait_for_steps(ground, command)
        return
    ground.evaluating.unlink(missing_ok=True)
    if (
        not wait_for(lambda: not command.running or ground.evaluating.exists())
        or not command.running
    ):
        raise Broken(f"error: no evaluation began: {command.tail()}")
    time.sleep(ground.random.uniform(0.0, 0.9 * EVALUATION_SECONDS))


def _wait_for_steps(ground: Ground, command: Command) -> None:
    """Wait until some more steps are journaled. All 200 take half a minute with the start."""
    wanted = _steps(ground) + ground.random.randrange(4, FURTHEST)
    if not wait_for(lambda: not command.running or _steps(ground) >= wanted) or not command.running:
        raise Broken(f"error: step {wanted} was not reached: {command.tail()}")


def _steps(ground: Ground) -> int:
    run = ground.the_run()
    return 0 if run is None or not run.events.exists() else max(promises.journaled(run), default=0)


def _has_ended(ground: Ground) -> bool:
    run = ground.the_run()
    return run is not None and run.events.exists() and last_end(run) is not None


def _send(ground: Ground, fault: SignalFault, when: str = "") -> None:
    victim = ground.roles().get(fault.target)
    if victim is None:
        raise Broken(f"error: there is no {fault.target} to signal")
    for number in range(fault.times):
        time.sleep(ground.random.uniform(0.0, 0.5) if number else 0.0)
        with contextlib.suppress(psutil.Error):
            victim.send_signal(fault.number)
    ground.note_fault(f"{fault.label} {when}".strip())


def _ends_soon(command: Command, *codes: int, seconds: float = STOP_SECONDS) -> int:
    """Check that the command ends soon, with one of these exit codes. Return it."""
    began = time.monotonic()
    code = command.wait()
    took = time.monotonic() - began
    if code not in codes:
        wanted = " or ".join(map(str, codes))
        raise Broken(f"wrong status: exit code {code}, wanted {wanted}: {command.tail()}")
    if took > seconds:
        raise Broken(f"hang: the command ended {took:.0f} s after the signal: {command.tail()}")
    return code


def _stopped_where_it_was(ground: Ground, reference: Curves) -> None:
    """Check that the run is KILLED with the reason, and has a checkpoint of its last step."""
    promises.no_process_is_left(ground)
    run = the_run(ground)
    promises.delivered_without_sync(run)
    is_consistent(ground, reference, ("KILLED",))
    step, last, ended = (
        promises.checkpoints_are_intact(run),
        max(promises.journaled(run), default=0),
        last_end(run),
    )
    if step != last or last in (0, STEPS):
        raise Broken(f"lost: stopped at step {last}, the newest checkpoint is of step {step}")
    if ended is None or not ended.reason.startswith("stopped by "):
        raise Broken(
            f"wrong: a signal stopped the run, but its reason is {ended and ended.reason!r}"
        )


def _began_once(ground: Ground) -> None:
    begun = sum(isinstance(event, RunStarted) for event in read_all(the_run(ground).events))
    if begun != 1:
        raise Broken(f"wrong: the training began {begun} times although a signal stopped it")

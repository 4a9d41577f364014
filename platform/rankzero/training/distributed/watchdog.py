"""A watchdog in every rank: a rank that hangs ends the run with its stack, instead of a silence without end."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from rankzero.launch.failures import Failure, FailureKind, place_of

CHECKS = 20  # per limit
FIRST_STEP = (
    6.0  # the first step may take so many times as long: it compiles, and data loaders start
)
AROUND_SECONDS = 1800.0  # before the first step and after the last: at least so long, data may have to be fetched
OTHERS = 1.5  # who waits for the others ends so many times later: the one that hangs is to be named
TELL_SECONDS = 5.0  # to leave word: a rank 0 that is stopped answers nobody
WAITING = (
    "torch/distributed",
    "torch/autograd",
    "torch/nn/parallel",
    "torch/cuda",
    "training/distributed/world.py",
    "training/metrics/window.py",
)
"""Where the innermost Python frame of a rank is that waits for the others, or for its device."""


SETTING_UP, TRAINING, ENDING = "in set-up", "", "after the last step"


class Watchdog:
    """Watches one rank's progress, for the duration of `watching`.

    `minutes`: the longest time without a `beat` while `training`, None: for ever; before and after that nothing beats,
    and all of it together may take as long as a first step, at least half an hour.
    Time in which this whole process was stopped (Ctrl-Z, a scheduler that suspends jobs) does not count.
    `told`: are given the failure before the process ends, side by side.
    """

    def __init__(self, minutes: float | None, rank: int, *told: Callable[[Failure], None]) -> None:
        self._seconds = None if minutes is None else 60.0 * minutes
        self._rank, self._told = rank, told
        self._last, self._beats = time.monotonic(), 0
        self._phase = SETTING_UP
        self._over = threading.Event()

    def beat(self) -> None:
        """Say that this rank gets on. Costs a tenth of a microsecond."""
        self._last = time.monotonic()
        self._beats += 1

    def begin(self) -> None:
        """Say that what comes next is a first step, which may take longer."""
        self._last, self._beats = time.monotonic(), 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the main thread for the duration of the block."""
        if self._seconds is None:
            yield
            return
        self._last = time.monotonic()
        thread = threading.Thread(
            target=self._watch, args=(self._seconds,), name="watchdog", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Expect beats for the duration of the block."""
        self._enter(TRAINING)
        try:
            yield
        finally:
            self._enter(ENDING)

    def _enter(self, phase: str) -> None:
        self._last = (
            time.monotonic()
        )  # first: who reads the phase, and then this, measures no phase by another's time
        self._phase = phase

    def _watch(self, limit: float) -> None:
        waited = 0.0  # when it was last seen to wait: who is let go because a peer has died does not hang since then
        looked = time.monotonic()
        while not self._over.wait(limit / CHECKS):
            if (stopped := time.monotonic() - looked - limit / CHECKS) > limit / CHECKS:
                self._last, waited = self._last + stopped, waited + stopped
            looked = time.monotonic()
            allowed, last, now = (
                self._allowed(limit, phase := self._phase),
                self._last,
                time.monotonic(),
            )
            since, frame = (
                max(last, waited),
                sys._current_frames()[threading.main_thread().ident or 0],
            )
            if waits(frame):
                since, allowed, waited = last, allowed * OTHERS, now
            if now - since > allowed:
                self._bite(frame, now - since, phase)

    def _allowed(self, limit: float, phase: str) -> float:
        if phase == TRAINING and self._beats > 1:
            return limit
        return FIRST_STEP * limit if phase == TRAINING else max(FIRST_STEP * limit, AROUND_SECONDS)

    def _bite(self, frame: FrameType, silent: float, phase: str) -> None:
        """Leave word, leave every thread's stack in the log, and end: nobody can wake a thread that hangs."""
        stack = traceback.extract_stack(frame)
        did = "waited for the others" if waits(frame) else "hung"
        when = f" {phase}" if phase else ""
        place = place_of(stack)
        first = self._rank - int(os.environ.get("LOCAL_RANK", "0"))
        others = "".join(
            f"; rank {first + local} is stopped, by SIGSTOP or a debugger"
            for local in stopped_beside()
        )
        reason = f"rank {self._rank} {did} for {silent:.0f} s{when}{f' ({place})' if place else ''}{others}"
        error = "".join(traceback.format_list(stack))
        failure = Failure(time.time(), self._rank, reason, error, FailureKind.HANG)
        _in_time([functools.partial(told, failure) for told in self._told])
        _in_time(
            [
                functools.partial(
                    _print_stacks, f"{reason}; train.limits.hang_minutes sets the limit"
                )
            ]
        )
        os.kill(os.getpid(), signal.SIGKILL)


def _print_stacks(reason: str) -> None:
    print(reason, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)


def _in_time(calls: Sequence[Callable[[], None]]) -> None:
    """Do what may fail, or take for ever on a disk or a rank that answers no more, for some seconds."""

    def tried(call: Callable[[], None]) -> None:
        with contextlib.suppress(Exception):
            call()

    threads = [threading.Thread(target=tried, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + TELL_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def waits(frame: FrameType) -> bool:
    """Tell whether a thread waits for what others do, by its innermost Python frame."""
    return any(part in frame.f_code.co_filename for part in WAITING)


def stopped_beside(proc: Path = Path("/proc")) -> list[int]:
    """Return the local ranks of this node's ranks that are stopped: those say nothing themselves. Linux only.

    A rank is a child of the same parent, whose output goes to ``logs/…/<local rank>/stdout.log``.
    """
    found = []
    for path in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state in "Tt" and int(parent) == os.getppid():
                found.append(int((path.parent / "fd" / "1").readlink().parent.name))
    return sorted(found)

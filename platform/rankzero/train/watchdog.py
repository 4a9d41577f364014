"""A watchdog in every rank: a rank that hangs ends the run with its stack, instead of a silence without end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from rankzero.train.failure import Failure, place_of

CHECKS = 20  # per limit
FIRST_STEP = 6.0  # the first step may take so many times as long: it compiles, and data loaders start
OTHERS = 1.5  # who waits for the others ends so many times later: the one that hangs is to be named
TELL_SECONDS = 5.0  # to leave word: a rank 0 that is stopped answers nobody
WAITING = (
    "torch/distributed",
    "torch/autograd",
    "torch/nn/parallel",
    "torch/cuda",
    "train/world.py",
    "train/meters.py",
)
"""Where the innermost Python frame of a rank is that waits for the others, or for its device."""


class Watchdog:
    """Watches one rank's progress, for the duration of `watching`.

    `minutes`: the longest time without a `beat`; None: for ever. `told`: is given the failure before the process ends.
    """

    def __init__(self, minutes: float | None, rank: int, told: Callable[[Failure], None]) -> None:
        self._seconds = None if minutes is None else 60.0 * minutes
        self._rank, self._told = rank, told
        self._last, self._beats = time.monotonic(), 0
        self._over = threading.Event()

    def beat(self) -> None:
        """Say that this rank gets on. Costs a tenth of a microsecond."""
        self._last = time.monotonic()
        self._beats += 1

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the main thread for the duration of the block."""
        if self._seconds is None:
            yield
            return
        self._last = time.monotonic()
        thread = threading.Thread(target=self._watch, args=(self._seconds,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self, limit: float) -> None:
        while not self._over.wait(limit / CHECKS):
            silent = time.monotonic() - self._last
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            allowed = limit * (OTHERS if waits(frame) else 1.0) * (1.0 if self._beats > 1 else FIRST_STEP)
            if silent > allowed:
                self._bite(frame, silent)

    def _bite(self, frame: FrameType, silent: float) -> None:
        """Leave word, leave every thread's stack in the log, and end: nobody can wake a thread that hangs."""
        stack = traceback.extract_stack(frame)
        did = "waited for the others" if waits(frame) else "hung"
        place = place_of(stack)
        first = self._rank - int(os.environ.get("LOCAL_RANK", "0"))
        others = "".join(f"; rank {first + local} is stopped, by SIGSTOP or a debugger" for local in stopped_beside())
        reason = f"rank {self._rank} {did} for {silent:.0f} s{f' ({place})' if place else ''}{others}"
        failure = Failure(time.time(), self._rank, reason, "".join(traceback.format_list(stack)))
        tells = threading.Thread(target=self._told, args=(failure,), daemon=True)
        tells.start()
        tells.join(TELL_SECONDS)
        print(f"{reason}; train.hang_minutes sets the limit", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


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
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state in "Tt" and int(parent) == os.getppid():
                found.append(int((path.parent / "fd" / "1").readlink().parent.name))
    return sorted(found)

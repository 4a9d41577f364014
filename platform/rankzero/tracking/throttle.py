"""Leaves processor time to the training, and never starves.

Priorities cannot do both. On a busy machine a process at idle priority gets nothing for minutes,
and without privileges a process may lower its priority but not raise it again. So the courier
keeps a normal priority and pauses by itself, the less the longer it is behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

# Seconds behind -> the most of one processor that it may use while others wait for one.
SHARES = ((20.0, 1.0), (10.0, 0.3), (0.0, 0.1))
# After so much processor time it looks whether to pause.
_SLICE_SECONDS = 0.02
# An import may use a second before Python can handle the signal.
_LONGEST_PAUSE = 1.0  # seconds
# On a machine with free processors, a process that wants one waits for nearly nothing.
_CONTENDED = 0.2


class Throttle:
    """Pauses the main thread of this process, by a timer that counts processor time.

    Use it as a context manager, in the main thread. `wait` waits for so many seconds, or until the
    training is over, and returns whether it is.
    """

    def __init__(
        self,
        wait: Callable[[float], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
        waited: Callable[[], float | None] | None = None,
    ) -> None:
        self._wait, self._clock, self._used = wait, clock, used
        self._waited = waited or _seconds_waited
        self._caught_up_at, self._pauses = clock(), False
        self._before = (clock(), used(), self._waited())

    def __enter__(self) -> Throttle:
        # A process that wakes up does not interrupt another one at once.
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        signal.signal(signal.SIGPROF, self._on_timer)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, _SLICE_SECONDS, _SLICE_SECONDS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The interpreter dies of the signal if it arrives after the handlers are gone.
        _lift()

    def caught_up(self) -> None:
        """Note that nothing is left to do now."""
        self._caught_up_at = self._clock()

    def pause(self) -> None:
        """Wait if this process has used more than its share while others wanted a processor."""
        (at, used_before, waited_before), waited = self._before, self._waited()
        used, now = self._used() - used_before, self._clock()
        behind = now - self._caught_up_at
        share = next(share for seconds, share in SHARES if behind >= seconds)
        waiting = None if waited is None or waited_before is None else waited - waited_before
        # Where Linux does not count the waiting, others may want the processor at any time.
        contended = waiting is None or waiting > _CONTENDED * used
        pause = used / share - (now - at)
        if share < 1.0 and contended and pause > 0 and self._wait(min(pause, _LONGEST_PAUSE)):
            _lift()
        self._before = (self._clock(), self._used(), self._waited())

    def _on_timer(self, _number: int, _frame: FrameType | None) -> None:
        # The timer counts all threads, so it may go off while this one waits.
        if not self._pauses:
            self._pauses = True
            try:
                self.pause()
            finally:
                self._pauses = False


def _lift() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0.0)


def _seconds_waited() -> float | None:
    """Return how long this process's main thread has waited for a processor, or None."""
    try:
        return int(Path("/proc/self/schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None

"""How the courier leaves processor time to the training.

It begins at idle priority, which costs the training nothing. On a busy machine such a process gets
nothing for minutes, and without privileges it cannot leave idle priority. So the recorder starts
another courier in its place. That one keeps a normal priority and pauses by itself, the less the
longer it is behind. Among many processes it does not pause: its share is small there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

# Seconds behind -> the most of one processor that it may use while others wait for one.
_SHARES = ((20.0, 1.0), (10.0, 0.3), (0.0, 0.1))
# After so much processor time it looks whether to pause.
_SLICE_SECONDS = 0.02
# An import may use a second before Python can handle the signal.
_LONGEST_PAUSE = 1.0  # seconds
# On a machine with free processors, a process that wants one waits for nearly nothing.
_CONTENDED = 0.2
# More threads than so many for each processor want to run: not only the training does.
_CROWDED = 3.0


class Throttle:
    """Pauses the main thread of this process, by a timer that counts processor time.

    Use it as a context manager, in the main thread. `wait` waits for so many seconds, or until the
    training is over, and returns whether it is. `behind`: for how many seconds an earlier courier
    has delivered nothing.
    """

    def __init__(
        self,
        wait: Callable[[float], bool],
        *,
        behind: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
        waited: Callable[[], float | None] | None = None,
        crowded: Callable[[], bool] | None = None,
    ) -> None:
        self._wait, self._clock, self._used = wait, clock, used
        self._crowded = crowded or is_crowded
        self._waited = waited or _seconds_waited
        self._caught_up_at, self._pauses = clock() - behind, False
        self._before = (clock(), used(), self._waited())

    def __enter__(self) -> Throttle:
        # A process that wakes up does not interrupt another one at once.
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        signal.signal(signal.SIGPROF, self._on_timer)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, _SLICE_SECONDS, _SLICE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
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
        share = next(share for seconds, share in _SHARES if behind >= seconds)
        waiting = None if waited is None or waited_before is None else waited - waited_before
        # If Linux does not count the waiting, others may want the processor at any time.
        contended = waiting is None or waiting > _CONTENDED * used
        # Among many processes its full share is small, and the others would take what it leaves.
        contended = contended and not self._crowded()
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


class ProcessorTime(NamedTuple):
    """How long the main thread of a process has run and waited, in seconds."""

    used: float
    waited: float
    """How long it was ready to run, and others had the processors."""


def processor_time(process: int | str = "self") -> ProcessorTime | None:
    """Return what Linux has counted for a process since its start, or None if it did not."""
    try:
        used, waited, _ = Path(f"/proc/{process}/schedstat").read_bytes().split()
        return ProcessorTime(int(used) / 1e9, int(waited) / 1e9)
    except (OSError, ValueError):
        return None


def is_crowded() -> bool:
    """Return whether many more threads want to run than there are processors."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, IndexError, ValueError):
        return False
    return running > _CROWDED * (os.cpu_count() or 1)


def _seconds_waited() -> float | None:
    found = processor_time()
    return None if found is None else found.waited


def give_way() -> None:
    """Let this process run only while no other one wants the processor."""
    # Desktops schedule a session as a whole, whatever the priorities of its processes.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):
        os.nice(19)


def end_giving_way(process: int) -> bool:
    """Give another process of this user a normal priority again. Return whether that is allowed."""
    try:
        os.sched_setscheduler(process, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, process, 0)
    except (OSError, AttributeError):
        return False
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text("0")
    return True

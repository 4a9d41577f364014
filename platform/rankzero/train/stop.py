"""The only way back into a run: ask it to stop, and why. Every rank reads the answer at the same step."""

from __future__ import annotations

import signal
import time
from types import FrameType

REASONS = {
    1: "stopped by SIGTERM",
    2: "stopped by Ctrl-C",
    3: "reached train.max_minutes",
    4: "pruned",
}
SIGTERM, SIGINT, TIME_LIMIT, PRUNED = REASONS
_CODES = {signal.SIGTERM: SIGTERM, signal.SIGINT: SIGINT, signal.SIGHUP: SIGTERM, signal.SIGUSR2: PRUNED}


class Stop:
    """This rank's wish to stop: a code of `REASONS`, 0 for none. The first wish counts."""

    def __init__(self) -> None:
        self._code = 0
        self._deadline = float("inf")

    def limit(self, minutes: float | None) -> None:
        """Ask the run to stop once `minutes` have passed from now; None: never."""
        self._deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes

    def __call__(self, code: int) -> None:
        """Ask the run to stop. Safe in a signal handler; repeating it changes nothing."""
        self._code = self._code or code

    @property
    def code(self) -> int:
        if time.monotonic() > self._deadline:
            self(TIME_LIMIT)
        return self._code


def listen(stop: Stop) -> None:
    """Let SIGTERM, SIGINT and a search's SIGUSR2 set `stop`, and SIGQUIT end this process at once. Main thread only."""
    for number in _CODES:
        signal.signal(number, lambda received, _frame: stop(_CODES[signal.Signals(received)]))
    signal.signal(signal.SIGQUIT, _interrupt)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt

"""How long a trial, or a cell of the probe map, has shown no sign of life."""

from __future__ import annotations

import time
from collections.abc import Callable

_MOST_BETWEEN = 1.0  # seconds between two looks, of which the search has several a second


class Silence:
    """The seconds since the last sign of life. Time in which the search stood still does not count.

    A scheduler, Ctrl-Z or a slow database stops the search for a while. The trial may have
    been stopped, too, or its signs are not yet read.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked, self._seconds = clock, clock(), 0.0

    def look(self, *, is_alive: bool) -> float:
        """Return the seconds. `is_alive`: there was a sign of life since the last look."""
        before, self._looked = self._looked, self._clock()
        passed = min(self._looked - before, _MOST_BETWEEN)
        self._seconds = 0.0 if is_alive else self._seconds + passed
        return self._seconds

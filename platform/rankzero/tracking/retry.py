"""When to try again, and when not to: waits that grow, and what a store will never take."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable

log = logging.getLogger("rankzero.recorder")

LONGEST_WAIT_SECONDS = 30.0
HURRIED_WAIT_SECONDS = 5.0  # where somebody waits, and who tries gives up before long


class Backoff:
    """When to try again: after about 1, 2, 4 … 30 seconds, at random, so that recorders do not march in step."""

    def __init__(self) -> None:
        self.failures, self._at, self._longest = 0, 0.0, LONGEST_WAIT_SECONDS

    @property
    def over(self) -> bool:
        """Tell whether the wait after the latest failure is over."""
        return time.monotonic() >= self._at

    def fail(self, wait: bool = True) -> None:
        """Wait before the next try, longer with each failure in a row; without `wait`, count the failure only."""
        seconds = min(self._longest, 2.0 ** min(self.failures, 10)) if wait else 0.0
        self.failures += 1
        self._at = time.monotonic() + seconds * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Forget the failures: a try went well."""
        self.failures, self._at = 0, 0.0

    def hasten(self) -> None:
        """Try again at once, and from now on every few seconds."""
        self.reset()
        self._longest = HURRIED_WAIT_SECONDS


PAUSE_SECONDS = 5.0  # after what should not happen
GRACE_SECONDS = 60.0


def grace_seconds() -> float:
    """Return how long to go on without progress after the end of rank 0, and how long a command waits then, in all."""
    return float(os.environ.get("RANKZERO_DELIVERY_GRACE_SECONDS") or GRACE_SECONDS)


def guarded(action: Callable[[], object]) -> bool:
    """Do it and return whether anything was done: not where it fails, as on a full disk, which may have an end."""
    try:
        return bool(action())
    except Exception:
        log.exception("unexpected; trying again")
        time.sleep(PAUSE_SECONDS)
        return False


def succeeds(action: Callable[[], object]) -> bool:
    """Do it as `guarded` does, and return whether it did not fail."""

    def done() -> bool:
        action()
        return True

    return guarded(done)


SUSPICIOUS_FAILURES = 8  # of one item in a row: the server is asked for something else
CERTAIN_ANSWERS = (
    3  # with a failure between each and the next: a server that works now and then is no proof
)


class BlameTracker:
    """Falls on an item that keeps failing while MLflow does all else; a server that is away casts none."""

    def __init__(self) -> None:
        self._answers = (
            0  # times in a row that MLflow answered, each just after the item had failed
        )

    @property
    def stands(self) -> bool:
        """Tell whether MLflow answered when it was last asked, so that waiting would help nobody."""
        return self._answers > 0

    def confirmed(self, failures: int, answers: Callable[[], bool]) -> bool:
        """Tell whether an item that failed so often is at fault; `answers` asks MLflow for something else."""
        if failures < SUSPICIOUS_FAILURES:
            return False
        self._answers = self._answers + 1 if answers() else 0
        return self._answers > CERTAIN_ANSWERS

    def clear(self) -> None:
        """Begin anew: something was sent, or is known to be refused."""
        self._answers = 0

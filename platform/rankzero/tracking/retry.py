"""When to try again: waits that grow, and actions that a failure must not end."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import time
from collections.abc import Callable

log = logging.getLogger("rankzero.recorder")

LONGEST_WAIT_SECONDS = 30.0
HURRIED_WAIT_SECONDS = 5.0  # while a command waits, which gives up before long
PAUSE_SECONDS = 5.0  # after an unexpected error
GRACE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Backoff:
    """The failures in a row of one kind of request, and when it is due again."""

    failures: int = 0
    due: float = 0.0
    """On the monotonic clock."""
    answers: int = 0
    """How often in a row MLflow accepted another request right after this one had failed."""

    def failed(self, now: float, longest: float) -> Backoff:
        """Return the state after one more failure: due in about 1, 2, 4 … `longest` seconds.

        The wait is random, so that couriers do not send in step. While MLflow accepts other
        requests it is 0, because waiting helps nobody.
        """
        seconds = 0.0 if self.answers else min(longest, 2.0 ** min(self.failures, 10))
        due = now + seconds * random.uniform(0.5, 1.0)
        return dataclasses.replace(self, failures=self.failures + 1, due=due)


def grace_seconds() -> float:
    """Return how long delivery may last after rank 0's end.

    A recorder stops after this time without progress, and a command stops waiting after it in all.
    """
    return float(os.environ.get("RANKZERO_DELIVERY_GRACE_SECONDS") or GRACE_SECONDS)


def guarded(action: Callable[[], object], pause_seconds: float = PAUSE_SECONDS) -> bool:
    """Run the action and return whether it did anything. After an error, pause and return False.

    The error may end by itself, as a full disk does, so the caller tries again.
    """
    try:
        return bool(action())
    except Exception:
        log.exception("unexpected error; trying again")
        time.sleep(pause_seconds)
        return False


def succeeds(action: Callable[[], object], pause_seconds: float = PAUSE_SECONDS) -> bool:
    """Run the action and return whether it raised no error. After one, pause."""

    def done() -> bool:
        action()
        return True

    return guarded(done, pause_seconds)

"""When to try again: waits that grow, and actions that a failure must not end."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable, Hashable

from rankzero.run_store.delivery_state import Retries

log = logging.getLogger("rankzero.recorder")

LONGEST_WAIT_SECONDS = 30.0
_HURRIED_WAIT_SECONDS = 5.0  # while a command waits, which gives up before long
PAUSE_SECONDS = 5.0  # after an unexpected error


@dataclasses.dataclass(frozen=True)
class _Backoff:
    """How often in a row one kind of request failed or came too early, and when it is due again."""

    failures: int = 0
    due: float = 0.0
    """On the monotonic clock."""
    answers: int = 0
    """How often in a row MLflow accepted another request right after this one had failed."""


class RetryPolicy:
    """When each kind of request is due, and what to count of the outages.

    Waits grow to about 1, 2, 4 … `longest_wait` seconds. They are random, so that couriers do not
    send in step.
    """

    def __init__(self, longest_wait: float, clock: Callable[[], float]) -> None:
        self._longest_wait, self._clock = longest_wait, clock
        self._backoffs: dict[Hashable, _Backoff] = {}
        self._away_since: float | None = None

    def hasten(self) -> None:
        """Try everything at once, and from now on every few seconds: a command waits."""
        self._backoffs = {}
        self._longest_wait = min(self._longest_wait, _HURRIED_WAIT_SECONDS)

    def of(self, kind: Hashable) -> _Backoff:
        """Return the failures of this kind of request since its last success."""
        return self._backoffs.get(kind, _Backoff())

    def is_due(self, kind: Hashable) -> bool:
        """Return whether the wait after the latest failure is over."""
        return self._clock() >= self.of(kind).due

    def answered(self, kind: Hashable, other: bool) -> int:
        """Note whether MLflow accepted another request after this failed; return the streak."""
        backoff = self.of(kind)
        answers = backoff.answers + 1 if other else 0
        self._backoffs[kind] = dataclasses.replace(backoff, answers=answers)
        return answers

    def postpone(self, kind: Hashable) -> None:
        """Wait, and longer than the last time."""
        backoff = self.of(kind)
        # While MLflow accepts other requests, waiting helps nobody.
        wait = 0.0 if backoff.answers else min(self._longest_wait, 2.0 ** min(backoff.failures, 10))
        due = self._clock() + wait * random.uniform(0.5, 1.0)
        self._backoffs[kind] = dataclasses.replace(backoff, failures=backoff.failures + 1, due=due)

    def failed(
        self, kind: Hashable, retries: Retries, error: str, *, answered: bool = False
    ) -> Retries:
        """Back off, and return the counts with this failure. An answer of MLflow is no outage."""
        is_first = not self._backoffs
        self.postpone(kind)
        outages, away, now = retries.outages, retries.away_seconds, self._clock()
        if self._away_since is not None:
            away, self._away_since = away + now - self._away_since, now
        elif not answered:
            # A courier that was started again may be in the same outage.
            outages, self._away_since = outages + (retries.error is None or not is_first), now
        return Retries(retries.failures + 1, outages, away, error)

    def succeeded(self, kind: Hashable, retries: Retries, *, reached: bool) -> Retries:
        """Return the counts. `reached` resets the kind's backoff, and ends an outage."""
        away = retries.away_seconds
        if reached:
            self._backoffs.pop(kind, None)
        if reached and self._away_since is not None:
            away += self._clock() - self._away_since
            self._away_since = None
        return dataclasses.replace(retries, away_seconds=away, error=None, gone=False)


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

"""Whose fault it is that something cannot be sent: its own, or the server's."""

from __future__ import annotations

from collections.abc import Callable

SUSPICIOUS_FAILURES = 8  # of one item in a row: the server is asked for something else
CERTAIN_ANSWERS = 3  # with a failure between each and the next: a server that works now and then is no proof


class Suspicion:
    """Falls on an item that keeps failing while MLflow does all else; a server that is away casts none."""

    def __init__(self) -> None:
        self._answers = 0  # times in a row that MLflow answered, each just after the item had failed

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

"""A folder from which the processes of a campaign take scenarios, and to which they add results."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from torture.results import Result


class Board:
    """Numbers the scenarios of a campaign. Only one process takes each number."""

    def __init__(self, folder: Path) -> None:
        self._taken, self._results = folder / "taken", folder / "results"
        self._gate, self._hall = folder / "gate", folder / "hall"
        for path in (self._taken, self._results):
            path.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def room(self, *, alone: bool) -> Iterator[None]:
        """Use the machine for a scenario: together with the other processes, or alone."""
        with self._gate.open("w") as gate, self._hall.open("w") as hall:
            # A process that waits for the machine holds the gate, so that no other overtakes it.
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(hall, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)
            yield

    def take(self) -> int:
        """Take the next free number and return it."""
        return next(number for number in itertools.count() if self._is_mine(number))

    def put(self, number: int, result: Result) -> None:
        """Add the result of a scenario."""
        path = self._results / f"{number:06d}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(result)))
        # Another process may read at any time, and must not find half a file.
        partial.rename(path)

    def results(self) -> list[Result]:
        """Return the results so far, in the order of the numbers."""
        return [
            Result(**json.loads(path.read_text())) for path in sorted(self._results.glob("*.json"))
        ]

    def injected(self) -> int:
        """Return the number of faults injected so far."""
        return sum(len(result.faults) for result in self.results())

    def _is_mine(self, number: int) -> bool:
        try:
            (self._taken / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

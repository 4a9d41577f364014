"""Where parts of a campaign that go on side by side take scenarios and put results: a folder."""

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
    """Each scenario of a campaign has a number, which one part alone takes."""

    def __init__(self, folder: Path) -> None:
        self._taken, self._results = folder / "taken", folder / "results"
        self._gate, self._hall = folder / "gate", folder / "hall"
        for path in (self._taken, self._results):
            path.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def room(self, *, alone: bool) -> Iterator[None]:
        """Have the machine for a scenario, with the other parts or alone; who waits for that is waited for."""
        with self._gate.open("w") as gate, self._hall.open("w") as hall:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(hall, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)
            yield

    def take(self) -> int:
        """Return the next number that nobody has taken."""
        return next(number for number in itertools.count() if self._is_mine(number))

    def put(self, number: int, result: Result) -> None:
        """Add what a scenario came to."""
        path = self._results / f"{number:06d}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(result)))
        partial.rename(path)  # whole for whoever reads

    def results(self) -> list[Result]:
        """Return what there is by now, in the order of the numbers."""
        return [
            Result(**json.loads(path.read_text())) for path in sorted(self._results.glob("*.json"))
        ]

    def injected(self) -> int:
        """Return how many faults there were by now."""
        return sum(len(result.faults) for result in self.results())

    def _is_mine(self, number: int) -> bool:
        try:
            (self._taken / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

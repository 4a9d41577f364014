"""One attempt as its recorder sees it: is it the latest, does rank 0 live, has it said how it ended?"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable

from rankzero.events import RunEnded
from rankzero.tracking import incumbent
from rankzero.tracking.journal import Journal, RunFolder, read

GRACE_SECONDS = 60.0
UNSAID = "rank 0 died without a word (killed by a signal such as SIGKILL or the out-of-memory killer)"


class Attempt:
    """The attempt that a recorder was started for; rank 0 holds the other end of its standard input."""

    def __init__(self, folder: RunFolder, node: int, token: str, stdin: int = 0) -> None:
        self.folder, self.node = folder, node
        self._token, self._stdin = token, stdin
        claim = incumbent.latest(folder, node)
        self._since = claim.time if claim else time.time()
        self._read_to = claim.events_offset if claim else 0
        self._pipe_closed = self._said = False
        self._at_end: list[Callable[[], None]] = []
        self._grace = float(os.environ.get("RANKZERO_DELIVERY_GRACE_SECONDS") or GRACE_SECONDS)
        self._moved = time.monotonic()
        self.ended = False

    @property
    def is_latest(self) -> bool:
        """Tell whether no newer attempt has begun."""
        claim = incumbent.latest(self.folder, self.node)
        return claim is None or claim.token == self._token

    @property
    def given_up(self) -> bool:
        """Tell whether the attempt is over and nothing has moved for the grace time."""
        return self.ended and time.monotonic() - self._moved > self._grace

    def at_end(self, action: Callable[[], None]) -> None:
        """Have `action` called when the attempt ends."""
        self._at_end.append(action)

    def moved(self) -> None:
        """Note progress: patience begins anew."""
        self._moved = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Wait, less when rank 0 ends meanwhile; notice the end, and say it where rank 0 could not."""
        if self.ended:
            time.sleep(min(seconds, 0.1))
            return
        if not self._pipe_closed:
            readable, _, _ = select.select([self._stdin], [], [], seconds)
            self._pipe_closed = bool(readable) and not os.read(self._stdin, 1)
        self._said = self._said or (self.node == 0 and self._find_end())
        if self._pipe_closed or self._said:
            self._end()

    def _find_end(self) -> bool:
        events, self._read_to = read(self.folder.events, self._read_to)
        return any(isinstance(event, RunEnded) for event in events)

    def _end(self) -> None:
        while self.node == 0 and not self._said:
            before = self._read_to
            self._said = self._find_end()
            if self._read_to == before:
                break
        for action in self._at_end:
            action()
        if self.node == 0 and not self._said and self.is_latest:
            with incumbent.turn(self.folder):
                if self.is_latest:
                    say_end(self.folder, self._since)
        self.ended = True
        self.moved()


def say_end(folder: RunFolder, since: float) -> None:
    """Append the RunEnded that the journal's dead writer could not, with the first failure that a rank left word of."""
    found = []
    for path in folder.failures.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            failure = json.loads(path.read_text())
            found.append((float(failure["time"]), str(failure["reason"]), str(failure["error"] or "")))
    _, reason, error = min((failure for failure in found if failure[0] >= since), default=(0.0, UNSAID, ""))
    journal = Journal(folder.events)
    journal(RunEnded(time.time(), "FAILED", reason, error or None, {}))
    journal.close()

"""One attempt as those beside rank 0 see it: is it the latest, does rank 0 live, has it said how it ended?"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import time
from collections.abc import Iterator

from rankzero.errors import UserError
from rankzero.events import RunEnded
from rankzero.redaction.text import text_without_secrets
from rankzero.run_store import claims
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import Journal, read, read_all

DIED_WITHOUT_WORD = (
    "rank 0 died without a word (killed by a signal such as SIGKILL or the out-of-memory killer)"
)

AT_WORK = "another command trains it still, or delivers it: stop that first, or wait for its end"


class LiveAttempt:
    """The attempt that `token` claims; rank 0 holds the other end of the pipe `stdin`."""

    def __init__(self, folder: RunFolder, node: int, token: str, stdin: int = 0) -> None:
        self.folder, self.node, self.token = folder, node, token
        self._directory = claims.directory(folder)
        claim = claims.latest(folder, node)
        self._since = claim.time if claim else time.time()
        self._read_to = claim.events_offset if claim else 0
        self._stdin = stdin
        self._closed = self._said = False

    @property
    def is_latest(self) -> bool:
        """Tell whether no newer attempt has begun, and no other run in a folder of this name."""
        if claims.directory(self.folder) not in (self._directory, None):
            return False
        claim = claims.latest(self.folder, self.node)
        return claim is None or claim.token == self.token

    @property
    def over(self) -> bool:
        """Tell whether rank 0 has said its end, or has closed the pipe, or is dead; as of the last `wait`."""
        return self._closed or self._said

    def wait(self, seconds: float) -> None:
        """Wait, less when rank 0 ends meanwhile."""
        if self.over:
            time.sleep(min(seconds, 0.05))
            return
        self._closed = closed(self._stdin, seconds)
        self._find_end()

    def ensure_run_ended(self) -> None:
        """Write for a dead rank 0 how the attempt ended, unless it did itself or a newer attempt has begun."""
        if self.node != 0:
            return
        with claims.exclusive_end(self.folder):
            self._find_end()
            if not self._said and self.is_latest:
                append_run_ended(self.folder, self._since)

    def _find_end(self) -> None:
        behind = -1
        while self.node == 0 and not self._said and behind != self._read_to:
            behind = self._read_to
            events, self._read_to = read(self.folder.events, behind)
            self._said = any(isinstance(event, RunEnded) for event in events)


def take_over(folder: RunFolder) -> None:
    """Make this process's attempt the run's latest. Raises UserError where another one of this machine writes it.

    Two that write one run would spoil each other's checkpoints, and the end of one would be taken for the other's.
    """
    with sole_launcher(folder, machines=2):  # none of one machine is about to start its ranks
        other = claims.claim_unless(folder, lambda claim: _writes_beside(folder, claim))
    if other is not None:
        raise UserError(
            f"process {other.pid} is writing {folder.path.name}: stop it first, or choose another name"
        )


@contextlib.contextmanager
def sole_launcher(folder: RunFolder, machines: int) -> Iterator[None]:
    """Keep other commands from launching this run as well, from before its first process to after its last.

    Between two attempts of one command nobody writes the run, and still it is that command's. Those of several
    machines, which may share the folder, keep away only those of one. Raises UserError.
    """
    with claims.launching(folder, fcntl.LOCK_EX if machines == 1 else fcntl.LOCK_SH) as mine:
        if not mine:
            raise UserError(f"{folder.path.name}: {AT_WORK}")
        yield


def is_written(folder: RunFolder) -> bool:
    """Tell whether somebody writes the journal and has not said the end; on another machine: whether of late."""
    claim = claims.latest(folder, 0)
    return (
        claim is not None
        and claims.writer_lives(folder)
        and not _said_since(folder, claim.events_offset)
    )


def _writes_beside(folder: RunFolder, claim: claims.Claim) -> bool:
    beside = claim.pid != os.getpid() and claims.is_local(claim) and claims.is_alive(claim)
    return beside and not _said_since(folder, claim.events_offset)


def _said_since(folder: RunFolder, offset: int) -> bool:
    return any(isinstance(event, RunEnded) for event in read_all(folder.events, offset))


def closed(pipe: int, seconds: float = 0.0) -> bool:
    """Tell whether the pipe's other end is closed, after at most some seconds."""
    readable, _, _ = select.select([pipe], [], [], seconds)
    return bool(readable) and not os.read(pipe, 1)


def append_run_ended(
    folder: RunFolder, since: float, unsaid: str = DIED_WITHOUT_WORD, at: float | None = None
) -> None:
    """Append the RunEnded that a dead rank 0 could not, with the first failure that any rank left word of.

    Where none did, `unsaid` is the reason. `at`: when it ended, if that is not now.
    """
    found = []
    for path in folder.failures.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            failure = json.loads(path.read_text(encoding="utf-8"))
            reason, error = (
                text_without_secrets(str(failure[name] or "")) for name in ("reason", "error")
            )
            found.append((float(failure["time"]), reason, error))
    _, reason, error = min(
        (failure for failure in found if failure[0] >= since), default=(0.0, unsaid, "")
    )
    journal = Journal(folder.events)
    journal(RunEnded(at or time.time(), "FAILED", reason, error or None, {}))
    journal.close()

"""One attempt, seen by other processes than rank 0: is it the latest, does it run, has it ended?"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rankzero.errors import UserError
from rankzero.events import Event, RunEnded, Status
from rankzero.redaction.text import text_without_secrets
from rankzero.run_store import disk, lock_files, run_locks
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import Journal, finish_line, read, read_all

DIED_WITHOUT_END = (
    "rank 0 died without writing its end "
    "(killed by a signal: a launcher's SIGTERM, as after another rank's error; "
    "SIGKILL; or the out-of-memory killer)"
)


class LiveAttempt:
    """The attempt that `token` claims. Rank 0 holds the other end of the pipe `stdin`."""

    def __init__(
        self,
        folder: RunFolder,
        node: int,
        token: str,
        stdin: int = 0,
        read: Callable[[Path, int], tuple[list[Event], int]] = read,
    ) -> None:
        self.folder, self.node, self.token = folder, node, token
        self._directory = run_locks.directory(folder)
        claim = run_locks.latest(folder, node)
        self._since = claim.time if claim else time.time()
        self._offset = claim.events_offset if claim else 0
        self._stdin, self._read = stdin, read
        self._pipe_closed = self._end_written = False

    @property
    def is_latest(self) -> bool:
        """Whether no newer attempt has begun, and no other run has a folder of this name."""
        if run_locks.directory(self.folder) not in (self._directory, None):
            return False
        claim = run_locks.latest(self.folder, self.node)
        return claim is None or claim.token == self.token

    @property
    def over(self) -> bool:
        """Whether rank 0 has written its end, closed the pipe or died, as of the last `wait`."""
        return self._pipe_closed or self._end_written

    def wait(self, seconds: float) -> None:
        """Wait, but not longer than rank 0 runs."""
        # A closed pipe is always readable, so `select` would not wait any more.
        if self.over:
            time.sleep(min(seconds, 0.05))
            return
        self._pipe_closed = closed(self._stdin, seconds)
        self._look_for_end()

    def ensure_run_ended(self) -> None:
        """Append RunEnded if rank 0 did not and no newer attempt has begun. Only node 0 does it."""
        if self.node != 0:
            return
        sync_pictures(self.folder)
        # Without the lock a new attempt could begin between the look and the append.
        with run_locks.exclusive_end(self.folder):
            self._look_for_end()
            if not self._end_written and self.is_latest:
                append_run_ended(self.folder, self._since)

    def _look_for_end(self) -> None:
        before = -1
        while self.node == 0 and not self._end_written and before != self._offset:
            before = self._offset
            events, self._offset = self._read(self.folder.events, before)
            self._end_written = any(isinstance(event, RunEnded) for event in events)


def take_over(folder: RunFolder) -> None:
    """Make this process's attempt the run's latest.

    Raises UserError if another process of this machine writes the run.
    """
    # Two writers would spoil each other's checkpoints, and the end of one would be taken for the
    # other's.

    def refuse(before: run_locks.Claim) -> None:
        lives = run_locks.is_local(before) and run_locks.writer_lives(folder)
        # Another container's process may have the same pid.
        is_mine = before.pid == os.getpid() and run_locks.is_alive(before)
        if lives and not is_mine and not _ended_since(folder, before.events_offset):
            raise UserError(
                f"process {before.pid} is writing {folder.path.name}: "
                "stop it, or choose another name"
            )

    # For another machine's ranks; no command of this machine is about to start its own.
    with sole_launcher(folder, machines=2):
        run_locks.claim(folder, 0, refuse)


@contextlib.contextmanager
def sole_launcher(folder: RunFolder, machines: int) -> Iterator[None]:
    """Keep other commands from launching this run, from before its first process to the last.

    Raises UserError if another command does.
    """
    # The lock also covers the time between two attempts, when no process writes the run. Commands
    # of a run on several machines share the lock, because they may share the folder.
    # `has_launcher` of another machine holds it for a moment.
    kind, seconds = (fcntl.LOCK_EX, 0.0) if machines == 1 else (fcntl.LOCK_SH, 1.0)
    with lock_files.lock(folder.path / "launcher.lock", kind, seconds) as is_sole:
        if not is_sole:
            raise UserError(
                f"{folder.path.name}: another command still trains or delivers it: stop that "
                "command, or wait until it ends"
            )
        yield


def has_launcher(folder: RunFolder) -> bool:
    """Return whether a command launches this run. Not for a command that does so itself."""
    with contextlib.suppress(OSError), lock_files.lock(folder.path / "launcher.lock") as is_free:
        return not is_free
    return False


def is_written(folder: RunFolder) -> bool:
    """Return whether the journal's writer lives and has not written the end.

    A writer on another machine counts as alive if it has written lately.
    """
    claim = run_locks.latest(folder, 0)
    return (
        claim is not None
        and run_locks.writer_lives(folder)
        and not _ended_since(folder, claim.events_offset)
    )


def closed(pipe: int, seconds: float = 0.0) -> bool:
    """Return whether the pipe's other end is closed, after at most `seconds`."""
    readable, _, _ = select.select([pipe], [], [], seconds)
    return bool(readable) and not os.read(pipe, 1)


def sync_pictures(folder: RunFolder) -> None:
    """Sync the pictures that rank 0 may not have synced.

    Takes long on a busy disk, and a new attempt waits only a moment for `run_locks.exclusive_end`.
    So call it before that.
    """
    with contextlib.suppress(OSError):
        disk.sync_all(folder.pictures.glob("*.npz"), folder.path)


def append_run_ended(
    folder: RunFolder,
    since: float,
    reason: str = DIED_WITHOUT_END,
    at: float | None = None,
    status: Status = "FAILED",
) -> None:
    """Append the RunEnded that a dead rank 0 could not, at the time `at` or now.

    The first failure that any rank has written since `since` gives the reason, else `reason` does.
    The caller has synced the pictures, because the end syncs the journal that names them.
    """
    failures = []
    for path in folder.failures.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            failure = json.loads(path.read_text(encoding="utf-8"))
            why, error = (
                text_without_secrets(str(failure[name] or "")) for name in ("reason", "error")
            )
            failures.append((float(failure["time"]), why, error))
    _, why, error = min(
        (failure for failure in failures if failure[0] >= since), default=(0.0, reason, "")
    )
    journal = Journal(folder.events)
    journal(RunEnded(at or time.time(), status, why, error or None, {}))
    journal.close()


def finish_lines(folder: RunFolder, node: int) -> None:
    """End lines that dead writers of a node's journals left unfinished, unless the disk is full."""
    for path in (folder.system(node), *([folder.events] if node == 0 else [])):
        with contextlib.suppress(OSError):
            finish_line(path)


def _ended_since(folder: RunFolder, offset: int) -> bool:
    return any(isinstance(event, RunEnded) for event in read_all(folder.events, offset))

"""Locks that the processes of a study hold in its store. They end with the process that holds them.

    SQLite, journal     bytes of a file next to the store. The kernel frees them.
    PostgreSQL, MySQL   locks of a session. The server frees them when the session ends.

A lock has a number. There is no call to free one: `close` frees all.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import struct
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rankzero.errors import UserError
from rankzero.mlflow_store import drivers
from rankzero.redaction.text import url_without_secrets
from rankzero.run_store.lock_files import open_lock

if TYPE_CHECKING:
    from sqlalchemy import Connection

# Optuna's own locks of a journal are called .lock.
_SUFFIX, _JOURNALS_SUFFIX = ".lock", ".members"
_JOURNAL = "journal:///"
FLOCK = "hhqqi0q"  # struct flock of fcntl(2): type, from where, first byte, bytes, process
_KEEP_SECONDS = 5.0
_CONNECT_SECONDS = 10.0


class _FileLocks:
    """Locks on bytes of a file, which has no content."""

    def __init__(self, path: Path) -> None:
        self._descriptor = open_lock(path)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def take(self, number: int) -> bool:
        """Return whether this process holds the lock now. Does not wait."""
        # These locks belong to the open file. Those of F_SETLK would end with any close of it.
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _bytes_of(number))
            return True
        return False

    def is_taken(self, number: int) -> bool:
        """Return whether another process, or another open file of this one, holds the lock."""
        found = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, _bytes_of(number))
        return bool(struct.unpack(FLOCK, found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Free all locks."""
        self._close()


class _Dialect(NamedTuple):
    """Queries to a server: to begin a session, to take a lock, to see whether it is taken."""

    begin: str
    take: str
    is_taken: str


_DIALECTS = {
    # Without keepalives the server would notice a machine's death after two hours.
    "postgresql": _Dialect(
        "SELECT set_config('tcp_keepalives_idle', '10', false), "
        "set_config('tcp_keepalives_interval', '5', false), "
        "set_config('tcp_keepalives_count', '4', false)",
        "SELECT pg_try_advisory_lock(:number)",
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        "AND ((classid::bigint << 32) | objid::bigint) = :number AND pid <> pg_backend_pid()",
    ),
    # A name has at most 64 characters, and belongs to the server and not to the database.
    "mysql": _Dialect(
        "SET SESSION wait_timeout = 30",
        "SELECT GET_LOCK(MD5(CONCAT(DATABASE(), ' ', :number)), 0)",
        "SELECT COALESCE(IS_USED_LOCK(MD5(CONCAT(DATABASE(), ' ', :number))), CONNECTION_ID()) "
        "<> CONNECTION_ID()",
    ),
}


class ServerLocks:
    """Locks of one session. A thread takes them again if the session was lost."""

    def __init__(self, url: str, dialect: _Dialect, keep_seconds: float = _KEEP_SECONDS) -> None:
        self._url, self._dialect, self._held = url, dialect, list[int]()
        self._session: Connection | None = None
        self._keep_seconds, self._back_at = keep_seconds, -math.inf
        self._mutex, self._over = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="rankzero-study-locks")
        self._thread.start()

    def take(self, number: int) -> bool:
        """Return whether this process holds the lock now. Does not wait."""
        with self._mutex:
            is_own = self._ask(self._dialect.take, number)
            if is_own and number not in self._held:
                self._held.append(number)
            return is_own

    def is_taken(self, number: int) -> bool:
        """Return whether another session holds the lock, or may soon take it again."""
        # A server that restarts ends all sessions, and their owners need moments to come back.
        return self._ask(self._dialect.is_taken, number) or (
            time.monotonic() < self._back_at + 2 * self._keep_seconds
        )

    def close(self) -> None:
        """Free all locks."""
        self._over.set()
        self._thread.join()
        if self._session is not None:
            self._session.detach()  # else the pool would keep the session open
            self._session.close()

    def _ask(self, query: str, number: int) -> bool:
        from sqlalchemy import text

        with self._mutex:
            is_new = self._session is None
            try:
                if self._session is None:
                    session = drivers.connect(self._url, _CONNECT_SECONDS)
                    self._session = session.execution_options(isolation_level="AUTOCOMMIT")
                    self._session.execute(text(self._dialect.begin))
                    for held in self._held:  # by a session that was lost
                        self._session.execute(text(self._dialect.take), {"number": held})
                        self._back_at = time.monotonic()
                return bool(self._session.execute(text(query), {"number": number}).scalar())
            except Exception:
                # The server may have ended the session, and all locks with it.
                broken, self._session = self._session, None
                if broken is not None:
                    broken.invalidate()
                if is_new:
                    raise
            return self._ask(query, number)

    def _keep(self) -> None:
        while not self._over.wait(self._keep_seconds):
            # A session may hold a lock many times. The server may be unreachable for a while.
            with contextlib.suppress(Exception), self._mutex:
                for number in self._held:
                    self._ask(self._dialect.take, number)


StoreLocks = _FileLocks | ServerLocks


def journal_of(url: str) -> Path | None:
    """Return the file of a journal, or None for a database. Raises UserError without a file."""
    if not url.startswith("journal:"):
        return None
    name = url.removeprefix(_JOURNAL)
    if name in ("", url):
        raise UserError(f"{url} names no file: write journal:////folder/studies.log")
    return Path(name).absolute()


def open_locks(url: str) -> StoreLocks:
    """Return the locks of the store at `url`. Raises UserError for one that has none."""
    from sqlalchemy.engine import make_url

    journal = journal_of(url)
    if journal is not None:
        return _FileLocks(journal.with_name(journal.name + _JOURNALS_SUFFIX))
    found = make_url(url)
    name = found.get_backend_name()
    if name == "sqlite" and found.database:
        return _FileLocks(Path(found.database + _SUFFIX).absolute())
    if name not in _DIALECTS:
        raise UserError(
            f"{url_without_secrets(url)} cannot keep a study: give --storage an SQLite file, "
            f"{_JOURNAL}FILE, or PostgreSQL to share the study between machines"
        )
    return ServerLocks(url, _DIALECTS[name])


def _bytes_of(number: int) -> bytes:
    return struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)

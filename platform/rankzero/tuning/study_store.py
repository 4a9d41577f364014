"""The store of a study: a database, or a journal, which is a file that only grows.

A journal costs a quarter of SQLite's processor time or less, because each change adds a line and no
more. Several machines may share it on a disk whose locks work for all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import Dialect, event
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import scoped_session, sessionmaker

from rankzero.errors import UserError
from rankzero.mlflow_store import drivers
from rankzero.redaction.text import text_without_secrets, url_without_secrets
from rankzero.tuning.store_locks import FLOCK, journal_of

_FIRST_OF_A_LINE = b'{"op_code":'
_LENGTH = len(_FIRST_OF_A_LINE)
_RESTART_SECONDS, _PAUSE_SECONDS = 60.0, 0.5  # for a server to restart; between two tries
_MOST_TRIES = 5  # to open a database whose tables another process makes at this moment


@contextlib.contextmanager
def open_store(url: str) -> Iterator[optuna.storages.BaseStorage]:
    """Open a study's store. One that is locked, foreign or unreachable raises UserError."""
    # Optuna logs each trial, and the search prints it already.
    optuna.logging.set_verbosity(logging.ERROR)
    # A choice among lists is stored as JSON, in each store here. Optuna warns at each reading.
    warnings.filterwarnings("ignore", "Choices for a categorical distribution should be a tuple")
    drivers.require_driver(url)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield _store(url)
    except UserError:
        raise
    # SQLAlchemy's, Alembic's and Optuna's own errors have no common base class.
    except Exception as error:
        first = (str(error).splitlines() or [repr(error)])[0]
        raise UserError(
            f"the study database {url_without_secrets(url)} cannot be used: "
            f"{text_without_secrets(first)}; nothing was changed. Choose another with --storage "
            "(it must not be MLflow's)"
        ) from error


def _store(url: str) -> optuna.storages.BaseStorage:
    journal = journal_of(url)
    if journal is not None:
        path = str(journal)
        # Optuna has no public name for the type of a lock.
        backend = JournalFileBackend(path, _AppendLock(path))  # type: ignore[arg-type]
        return optuna.storages.JournalStorage(backend)
    if url.startswith("sqlite"):
        # Seconds that a process waits for another one's write.
        return _database(url, {"connect_args": {"timeout": 30}})
    # A long trial asks nothing, and a firewall or a restart of the server ends idle connections.
    found = _database(drivers.with_keepalives(url), {"pool_pre_ping": True})
    # Only now: a server that was never reached is an error at once.
    event.listen(found.engine, "do_connect", connect_again)
    return found


def _database(url: str, settings: Mapping[str, Any]) -> optuna.storages.RDBStorage:
    """Open a database. Two searches that begin at once both make its tables, and one fails."""
    for _ in range(_MOST_TRIES - 1):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=dict(settings))
        except DBAPIError as error:
            if not isinstance(error, IntegrityError) and "already exists" not in str(error):
                raise
            time.sleep(_PAUSE_SECONDS)
    return optuna.storages.RDBStorage(url, engine_kwargs=dict(settings))


def connect_again(
    dialect: Dialect, _record: object, arguments: Sequence[Any], settings: Mapping[str, Any]
) -> Any:
    """Connect as SQLAlchemy does, and for a minute as long as the server lets nobody in."""
    until = time.monotonic() + _RESTART_SECONDS
    while True:
        try:
            return dialect.connect(*arguments, **settings)
        except dialect.loaded_dbapi.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_SECONDS)


@contextlib.contextmanager
def one_transaction(store: optuna.storages.BaseStorage) -> Iterator[None]:
    """Let Optuna write all of a block or nothing, in a database. A journal needs one write each."""
    if not isinstance(store, optuna.storages.RDBStorage):
        yield
        return
    # By itself it commits each attribute, and the disk or the server confirms each commit.
    own = store.scoped_session
    with store.engine.begin() as connection:
        joined = sessionmaker(connection, join_transaction_mode="rollback_only")
        store.scoped_session = scoped_session(joined)
        try:
            yield
        finally:
            store.scoped_session = own


class _AppendLock:
    """Lets one process at a time add lines to a journal, and cuts what a killed one began.

    Optuna's own locks outlive a killed process by 30 seconds. With a line that follows a part of
    one, Optuna cannot read the study any more.
    """

    def __init__(self, path: str) -> None:
        self._path, self._descriptor = path, -1

    def acquire(self) -> bool:
        """Wait for the lock. Raises ValueError if the file is no journal of Optuna's."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # The kernel frees it when the process ends, however it ends.
            whole = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, whole)
            _cut_unfinished_line(descriptor, self._path)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Free the lock."""
        os.close(self._descriptor)


def _cut_unfinished_line(descriptor: int, path: str) -> None:
    size = os.fstat(descriptor).st_size
    if size == 0:
        return
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as content:
        end = content.rfind(b"\n") + 1
        last = content.rfind(b"\n", 0, max(0, end - 1)) + 1
        # The first line, the last whole one, and what was begun. A power loss may leave zeros.
        starts = content[:_LENGTH], content[last : last + _LENGTH], content[end : end + _LENGTH]
    for start in starts if end else starts[2:]:
        begun = start.rstrip(b"\0")
        if begun != _FIRST_OF_A_LINE[: len(begun)]:
            raise ValueError(f"{Path(path).name} is no journal of Optuna's, or is damaged")
    if end < size:
        os.ftruncate(descriptor, end)

"""Locks that no other user can hold, and folders that no other user can write.

A flock needs only an open file. So any user who may read the file of a lock can hold it for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_OPEN_FILES = 65536


def allow_many_files() -> None:
    """Let this process open many files at a time. Many systems allow 1024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_lock(path: Path) -> int:
    """Open the file of a lock and return its descriptor. Creates the file. Raises OSError.

    Only its owner may open it, and users who may write its folder. They could replace it anyway.
    """
    # Created without the others' rights: they could open it before `fchmod` takes them away.
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    writers = path.parent.stat().st_mode & 0o022
    # Older versions created these files with mode 0644. Only the owner can mend that.
    with contextlib.suppress(PermissionError):
        os.fchmod(descriptor, 0o600 | writers | writers << 1)
    return descriptor


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX, seconds: float = 0.0) -> bool:
    """Return whether the lock is held now, after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002 if seconds < 1 else 0.05)
        except OSError:
            # A file system without locks. Then a second delivery is possible, and harmless.
            return True
        else:
            return True


@contextlib.contextmanager
def lock(path: Path, kind: int = fcntl.LOCK_EX, seconds: float = 0.0) -> Iterator[bool]:
    """Hold a lock for a block; yield whether it is held, after at most `seconds`."""
    descriptor = open_lock(path)
    try:
        yield try_lock(descriptor, kind, seconds)
    finally:
        os.close(descriptor)


def own_temporary_folder(shared: Path | None = None) -> Path | None:
    """Return this user's folder in the shared temporary folder, created if it is missing.

    Return None if another user was first to take its name, or if it cannot be created.
    """
    folder = (shared or Path(tempfile.gettempdir())) / f"rankzero-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        return None
    is_folder = stat.S_ISDIR(found.st_mode)  # with lstat, a link is none
    is_own = is_folder and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return folder if is_own else None

"""Ask the disk to keep what was written, so that a power loss does not take it away."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Return once the disk has confirmed a file, or a folder with the names in it. Raises OSError.

    After an error, write the content into a new file: the system may have dropped the old one.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync a folder. PostgreSQL ignores the same two errors.
        if not (path.is_dir() and error.errno in (errno.EBADF, errno.EINVAL)):
            raise
    finally:
        os.close(descriptor)

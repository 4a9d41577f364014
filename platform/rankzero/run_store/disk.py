"""Ask the disk to keep what was written, so that a power loss does not take it away."""

from __future__ import annotations

import errno
import os
from pathlib import Path

# The disk has failed or is full, so what was written may be lost.
_LOSSES = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


def sync(path: Path) -> None:
    """Return once the disk has confirmed a file, or a folder with the names in it. Raises OSError.

    After an error, write the content into a new file: the system may have dropped the old one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Some folders cannot be synced: the user may write a folder of a group and not read it, and
        # network and FUSE disks refuse in several ways. PostgreSQL ignores EBADF, EINVAL and EACCES
        # for folders.
        if error.errno in _LOSSES or not path.is_dir():
            raise

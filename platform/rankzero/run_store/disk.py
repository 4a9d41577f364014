"""Ask the disk to keep what was written, against a loss of power, and whether it is full."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

# The disk has failed or is full, so what was written may be lost.
_LOSSES = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


class Sync(Protocol):
    """The signature of `sync`."""

    def __call__(self, path: Path, piece: range | None = None) -> None: ...


def sync(path: Path, piece: range | None = None) -> None:
    """Return once the disk has confirmed a file, or a folder with the names in it. Raises OSError.

    After an error, write the content into a new file: the system may have dropped the old one.

    `piece`: only these bytes, from a whole number of pages on. Some network and FUSE disks cannot
    confirm them alone. So sync the file in the end, also for its length.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor) if piece is None else _sync_piece(path, piece)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Some folders cannot be synced: the user may write a folder of a group and not read it, and
        # network and FUSE disks refuse in several ways. PostgreSQL ignores EBADF, EINVAL and EACCES
        # for folders.
        # The system reports the loss of a piece once, so the sync of the file would not see it.
        if error.errno in _LOSSES or not (piece or path.is_dir()):
            raise


def sync_all(files: Iterable[Path], top: Path, confirm: Callable[[Path], None] = sync) -> None:
    """Sync files, and then once each folder from theirs up to `top`.

    Passes over what is no file or is gone, and a disk that cannot sync. Tries all of them, and then
    raises the first OSError of a disk that failed or is full.
    """
    found = [path for path in files if _is_file(path)]
    folders = {above for path in found for above in path.parents if above.is_relative_to(top)}
    lost: OSError | None = None
    # A folder after the folders in it: its names refer to them.
    for path in (*found, *sorted(folders, key=lambda folder: -len(folder.parts))):
        try:
            confirm(path)
        except OSError as error:
            if error.errno in _LOSSES:
                lost = lost or error
    if lost is not None:
        raise lost


def is_full(folder: Path, usage: Callable[[Path], Any] = shutil.disk_usage) -> bool:
    """Return whether a folder's disk has less than a MiB left."""
    try:
        found = usage(folder)
    except OSError:
        return False
    # Some FUSE disks do not tell their size.
    return bool(found.total and found.free < 1 << 20)


def _sync_piece(path: Path, piece: range) -> None:
    # Linux syncs the range of a shared mapping, also what was written without the mapping.
    with (
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), len(piece), offset=piece.start) as mapping,
    ):
        mapping.flush()


def _is_file(path: Path) -> bool:
    # A pipe would block who opens it.
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):  # gone, or a name that cannot be
        return False

"""Sizes of runs on disk, and their removal: a folder disappears in one step or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rankzero.errors import UserError
from rankzero.run_store import disk
from rankzero.run_store.folder import RunFolder

# A folder in the folder of the runs. It has no run.json, so nobody takes it for a run.
_LEFTOVERS = ".leftovers"
# An import or a copy works there, and an upload changes nothing in the folder. None takes a week.
_ABANDONED_SECONDS = 7 * 86400.0


def size(folders: Iterable[Path]) -> int:
    """Return the bytes of all files below the folders; a file with several hard links once."""
    found = {}
    for folder in folders:
        for file in _files(str(folder)):
            # It may be gone meanwhile.
            with contextlib.suppress(OSError):
                stat = file.stat(follow_symlinks=False)
                found[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(found.values())


def _files(folder: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            else:
                yield entry


def workplace(runs: Path, kind: str) -> Path:
    """Return the path of a new folder that is no run: what a kill leaves there, `tidy` removes."""
    place = runs / _LEFTOVERS
    place.mkdir(parents=True, exist_ok=True)
    # For all users who may write to the runs. It may be another user's, or on a disk without modes.
    with contextlib.suppress(OSError):
        if not place.is_symlink():
            place.chmod(runs.stat().st_mode & 0o7777)
    return place / f"{kind}-{secrets.token_hex(4)}"


def remove(folder: RunFolder) -> Path:
    """Make a run's folder a leftover. The caller holds the run's locks, and MLflow's part is gone.

    The caller gives the locks back and calls `erase`: NFS removes no folder with an open file.
    """
    left = folder.path.rename(workplace(folder.path.parent, "removed"))
    disk.sync(folder.path.parent)
    return left


def erase(leftovers: Sequence[Path]) -> None:
    """Remove leftovers. Raises UserError that names one in which a file cannot go."""
    for left in leftovers:
        shutil.rmtree(left, ignore_errors=True)
    if stuck := [left for left in leftovers if left.exists()]:
        raise UserError(f"cannot remove all of {stuck[0]}: remove it by hand")


def tidy(runs: Path) -> int:
    """Remove what removals and killed imports left; return the bytes that this freed."""
    freed = 0
    with contextlib.suppress(FileNotFoundError):
        for left in (runs / _LEFTOVERS).iterdir():
            with contextlib.suppress(OSError):
                age = time.time() - left.stat().st_mtime
                if left.name.startswith("removed-") or age > _ABANDONED_SECONDS:
                    freed += size([left])
                    # A file that cannot go stays. Another process may remove the folder now, too.
                    shutil.rmtree(left, ignore_errors=True)
                    freed -= size([left])
    return freed

"""Symbolic links in a run's folder: nothing is read or written through one that leads out.

A run that somebody else made may contain them. The run's folder itself may be a link, for example
to another disk. The check happens when a run is opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rankzero.run_store.names import InvalidRunFolder

_OURS = (".json", ".jsonl", ".lock", ".log", ".md", ".txt", ".yaml")


def refuse(folder: Path) -> None:
    """Raise InvalidRunFolder if the folder contains a link out of it, or a pipe with our names.

    A pipe would block its reader. Other files of a user may be of any kind.
    """
    try:
        found = list(folder.iterdir())
    except OSError:
        # It is gone or not readable. The code that opens it reports that.
        return
    odd = sorted(path.name for path in found if _is_odd(path))
    if odd:
        raise InvalidRunFolder(
            f"{folder} contains links that lead out of it, or pipes: "
            f"{', '.join(map(repr, odd))[:200]}. Replace each link with the file that it leads to, "
            "or delete it"
        )


def leads_out(path: Path, base: Path) -> bool:
    """Return whether a path, or a symbolic link at it or below it, leads out of folder `base`."""
    inside = path.resolve() != base.resolve() and path.resolve().is_relative_to(base.resolve())
    return not inside or any(below.is_symlink() for below in path.rglob("*"))


def no_follow(path: str, flags: int) -> int:
    """Open a file, but not through a link: an `opener` for ``open``. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _is_odd(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except OSError:
        # Files are replaced all the time.
        return False
    if not stat.S_ISLNK(mode):
        return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and path.name.endswith(_OURS)
    try:
        return not path.resolve().is_relative_to(path.parent.resolve())
    except (OSError, RuntimeError):
        # The link leads to itself.
        return True

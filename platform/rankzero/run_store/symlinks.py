"""Links in a run's folder, which somebody else may have made: nothing is read or written through one that leads out.

A run's folder may itself be a link, as the user's own way to keep a run on another disk. Looked at where a run is
opened; in the middle of one nobody is held up by what lies beside our files.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rankzero.run_store.names import InvalidRunFolder

OURS = (".json", ".jsonl", ".lock", ".log", ".md", ".txt", ".yaml")


def refuse(folder: Path) -> None:
    """Raise BrokenRun where the folder holds a link out of it, or a pipe (which hangs) in the place of a file of ours.

    What users put beside our files is theirs.
    """
    try:
        found = list(folder.iterdir())
    except OSError:
        return  # gone, or not ours to read: who opens it says so
    odd = sorted(path.name for path in found if _is_odd(path))
    if odd:
        raise InvalidRunFolder(
            f"{folder} holds what rankzero made none of: {', '.join(map(repr, odd))[:200]}; nothing in a run's folder "
            "may lead out of it: put what a link leads to in its place, or take it away"
        )


def no_follow(path: str, flags: int) -> int:
    """Open a file, not what a link leads to: an `opener` for ``open``. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _is_odd(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False  # gone meanwhile: files are replaced all the time
    if stat.S_ISLNK(mode):
        return _leads_out(path)
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and path.name.endswith(OURS)


def _leads_out(link: Path) -> bool:
    try:
        return not link.resolve().is_relative_to(link.parent.resolve())
    except (OSError, RuntimeError):  # to itself, in a circle
        return True

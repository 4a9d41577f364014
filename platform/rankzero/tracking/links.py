"""Links in a run's folder, which somebody else may have made: nothing is read or written through one.

A run's folder may itself be a link, as the user's own way to keep a run on another disk; what lies in it may not.
"""

from __future__ import annotations

import os
from pathlib import Path

from rankzero.tracking.names import BrokenRun


def refuse(folder: Path) -> None:
    """Raise BrokenRun where the folder holds a link, or a thing that is neither a file nor a folder (a pipe hangs)."""
    try:
        with os.scandir(folder) as entries:
            odd = sorted(entry.name for entry in entries if not _is_plain(entry))
    except OSError:
        return  # gone, or not ours to read: who opens it says so
    if odd:
        raise BrokenRun(
            f"{folder} holds what rankzero made none of: {', '.join(map(repr, odd))[:200]}; a run's folder has files "
            "and folders only, no links: put what a link leads to in its place, or take it away"
        )


def no_follow(path: str, flags: int) -> int:
    """Open a file, not what a link leads to: an `opener` for ``open``. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _is_plain(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)

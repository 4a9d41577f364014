"""The environment's choices for every command: the folder of the runs, and offline mode.

Imports next to nothing, because every command imports it.
"""

from __future__ import annotations

import os
from pathlib import Path


def root_of(folder: str | Path | None) -> Path:
    """Return the folder of the embedded store and the runs.

    It is `folder`, else $RANKZERO_DIR, else ``./mlruns``.
    """
    return Path(folder or os.environ.get("RANKZERO_DIR") or "mlruns")


def make_root(root: Path) -> None:
    """Create the folder of the runs if it is missing. Git ignores the new folder."""
    try:
        root.mkdir(parents=True)
    except FileExistsError:
        return
    # Another command may just have made the same folder, and written the same.
    (root / ".gitignore").write_text("*\n")


def may_be_foreign(file: str | Path, root: Path) -> bool:
    """Return whether a download or an import may have written a file: its code is not executed.

    They write to the runs and the artifacts only. The project may lie in `root`, with ``--dir .``.
    """
    path = Path(file).resolve()
    return any(path.is_relative_to((root / name).resolve()) for name in ("runs", "artifacts"))


def is_offline(choice: bool | None = None) -> bool:
    """Return whether runs are only recorded, not delivered: the choice, else $RANKZERO_OFFLINE."""
    if choice is not None:
        return choice
    return os.environ.get("RANKZERO_OFFLINE", "").lower() not in ("", "0", "false", "no", "off")

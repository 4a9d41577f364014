"""The open runs of this process, by folder. A fork leaves them to its parent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankzero.integrations.own_loop.tracked_run import TrackedRun

OPEN: dict[Path, TrackedRun] = {}


def _leave_to_parent() -> None:
    """End no run of the parent in a forked process, nor write its journal, nor wait for its lock.

    Values that are logged there are lost, with a note, while the parent's run is open.
    """
    for run in OPEN.values():
        run.disown()
    OPEN.clear()


os.register_at_fork(after_in_child=_leave_to_parent)

"""A room for a campaign: mounts and shared memory of its own, so that what is left there is the campaign's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INSIDE = "RANKZERO_TORTURE_ROOM"
SHARED_MEMORY = Path("/dev/shm")
UNCHECKED = "without a room of its own (unshare): shared memory not checked"


def enter(arguments: Sequence[str]) -> None:
    """Begin this program anew in a room of its own; stay where that is not allowed, or where it is in one already."""
    if is_mine():
        return
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    inside = f'mount -t tmpfs none {SHARED_MEMORY} && exec "$@"'
    command = ["unshare", "--mount", *rights, "sh", "-c", inside, "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
        words = [sys.executable, "-m", "torture.campaign", *arguments]
        os.execvpe(  # noqa: S606 - a list of words, no shell in between
            command[0], [*command, *words], {**os.environ, INSIDE: str(os.getpid())}
        )


def is_mine() -> bool:
    """Tell whether this process is the one that entered a room of its own."""
    return os.environ.get(INSIDE) == str(os.getpid())


def shared_memory() -> set[str]:
    """Return the files of shared memory that are known to be the campaign's: none where it shares them with others."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if is_mine() else set()

"""A mount namespace for a campaign, with shared memory that no other program uses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INSIDE = "RANKZERO_TORTURE_ROOM"
SHARED_MEMORY = Path("/dev/shm")
# Kept in reports.
UNCHECKED = "without a room of its own (unshare): shared memory not checked"


def enter(arguments: Sequence[str]) -> None:
    """Restart this program in its own namespace, unless it is in one or may not have one."""
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
    """Return whether this process has entered a namespace of its own."""
    return os.environ.get(INSIDE) == str(os.getpid())


def shared_memory() -> set[str]:
    """Return the campaign's files of shared memory; none if other programs may own some of them."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if is_mine() else set()

"""Whether Linux kills a process when its parent dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

COMMAND = "RANKZERO_COMMAND"
"""The environment variable by which a command's server learns the command's process ID."""
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def end_with_parent(parent: int | None = None) -> None:
    """Have Linux kill this process once the thread that started it ends. Nothing elsewhere.

    `parent`: its process ID, if known: Linux would not notice that it has ended already.
    """
    _set(signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os._exit(1)


def outlive_parent() -> None:
    """Take `end_with_parent` back."""
    _set(0)


def _set(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)

"""Whether Linux kills a process when its parent dies."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def end_with_parent() -> None:
    """Have Linux kill this process once the thread that started it ends. Nothing elsewhere."""
    _set(signal.SIGKILL)


def outlive_parent() -> None:
    """Take `end_with_parent` back."""
    _set(0)


def _set(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)

"""The name of a process in `top`. Forks have the command line of their parent."""

from __future__ import annotations

import contextlib
from pathlib import Path


def set_process_name(name: str) -> None:
    """Name this process; Linux keeps 15 characters. Does nothing elsewhere."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="ascii")

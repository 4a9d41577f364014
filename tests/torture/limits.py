"""Memory limits by control groups, of either version."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from torture.ground import NotRun, wait_for

# The mounts of control groups, and the name of the file with the limit.
PLACES = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


class MemoryLimit:
    """A control group. The kernel kills its processes once they use too much memory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, process: psutil.Process) -> bool:
        """Let the limit hold for what a process allocates from now on. Return whether it lives."""
        try:
            (self._path / "cgroup.procs").write_text(str(process.pid))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def memory_limit(name: str, megabytes: int) -> Iterator[MemoryLimit]:
    """Make a control group with a limit. Raises NotRun if this machine does not allow it."""
    for place, limit in PLACES:
        group = place / f"torture-{os.getpid()}-{name}"
        try:
            group.mkdir()
            (group / limit).write_text(str(megabytes << 20))
            break
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
    else:
        raise NotRun("a memory limit needs control groups that this user may create")
    try:
        yield MemoryLimit(group)
    finally:
        # It stays busy until the kernel has reaped the killed processes.
        wait_for(lambda: _is_removed(group), 10.0)


def _is_removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()

"""The node's processor, memory, disk and network, named and measured as MLflow's own monitors do.

A reading that a system cannot give (no network card, the folder is gone) is left out.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from rankzero.telemetry.rapl import CpuEnergy

_MEGABYTE = 1e6
# Samples between two looks at the process tree, which reads all of /proc.
_PROCESS_EVERY = 10
# A system may hide any of its files.
_UNREADABLE = contextlib.suppress(psutil.Error, OSError, RuntimeError)


def usable_cores() -> list[int]:
    """Return the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_count(root: Path = Path(os.sep)) -> int:
    """Return how many cores' time this process may use, rounded up.

    A container or a service may have a quota below the cores that it sees. More threads than that
    wait for each other. `root`: the folder with ``proc`` and ``sys``.
    """
    return max(1, min([len(usable_cores()), *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas of this process's control groups, in cores. Source: cgroups(7)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 names no controllers, and has both numbers in one file.
        top = root / ("sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup")
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        here = top / group.lstrip("/")
        # Each group above has a quota of its own.
        for folder in (here, *here.parents):
            if folder.is_relative_to(top):
                with contextlib.suppress(OSError, ValueError):
                    texts = " ".join((folder / name).read_text() for name in names)
                    quota, period = map(int, texts.replace("max", "-1").split())
                    if quota > 0 < period:
                        yield quota / period


class HostSampler:
    """Reads the whole node's load, and the memory of one job's processes, in one thread.

    `folder`: any path on the disk to watch. `process`: the pid at the root of the job's process
    tree, or None to leave its memory out. Network and energy are counted from here on.
    """

    def __init__(self, folder: Path = Path(os.sep), process: int | None = None) -> None:
        self._folder, self._process = folder, process
        self._samples = 0
        self._network_start: Any = None
        with _UNREADABLE:
            self._network_start = psutil.net_io_counters()
        self._energy = CpuEnergy()

    def sample(self) -> dict[str, float]:
        """Return the present readings; never raises what psutil raises."""
        metrics: dict[str, float] = {}
        with _UNREADABLE:
            percent = psutil.cpu_percent()
            # psutil measures since the thread's last call, and returns 0 to its first.
            if self._samples:
                metrics["cpu_utilization_percentage"] = percent
        with _UNREADABLE:
            memory = psutil.virtual_memory()
            metrics["system_memory_usage_megabytes"] = memory.used / _MEGABYTE
            # Not memory.percent, which counts what is not available. MLflow's number must agree.
            metrics["system_memory_usage_percentage"] = memory.used / memory.total * 100
        with _UNREADABLE:
            disk = psutil.disk_usage(os.fspath(self._folder))
            metrics["disk_usage_percentage"] = disk.percent
            metrics["disk_usage_megabytes"] = disk.used / _MEGABYTE
            metrics["disk_available_megabytes"] = disk.free / _MEGABYTE
        # Without a network card, psutil returns None, although its types exclude it.
        with _UNREADABLE, contextlib.suppress(AttributeError):
            now, start = psutil.net_io_counters(), self._network_start
            metrics["network_receive_megabytes"] = (now.bytes_recv - start.bytes_recv) / _MEGABYTE
            metrics["network_transmit_megabytes"] = (now.bytes_sent - start.bytes_sent) / _MEGABYTE
        with _UNREADABLE:
            if self._process is not None and self._samples % _PROCESS_EVERY == 0:
                metrics["process_memory_megabytes"] = _resident_bytes(self._process) / _MEGABYTE
        metrics |= self._energy.sample()
        self._samples += 1
        return metrics


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and of all its descendants, in bytes.

    Pages that several of them share, such as those of forked data workers, count for each.
    Raises psutil.NoSuchProcess if the process is gone.
    """
    root = psutil.Process(pid)
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += int(process.memory_info().rss)
        except psutil.Error:
            # It ended meanwhile.
            continue
    return total

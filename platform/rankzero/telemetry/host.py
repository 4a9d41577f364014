"""The node's processor, memory, disk and network, named and measured as MLflow's own monitors do.

A reading that a system cannot give (no network card, the folder is gone) is left out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

_MEGABYTE = 1e6
# Samples between two looks at the process tree, which reads all of /proc.
_PROCESS_EVERY = 10


def usable_cores() -> list[int]:
    """Return the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class HostSampler:
    """Reads the whole node's load, and the memory of one job's processes.

    `folder`: any path on the disk to watch. `process`: the pid at the root of the job's process
    tree, or None to leave its memory out. The network counters start at zero.
    """

    def __init__(self, folder: Path = Path(os.sep), process: int | None = None) -> None:
        self._folder = folder
        self._process = process
        self._samples = 0
        self._cpu_thread: int | None = None
        self._network_start = _network_counters()

    def sample(self) -> dict[str, float]:
        """Return the present readings; never raises what psutil raises."""
        metrics: dict[str, float] = {}
        for read in (self._cpu, _memory, self._disk, self._network, self._job):
            metrics.update(_or_nothing(read))
        self._samples += 1
        return metrics

    def _cpu(self) -> dict[str, float]:
        percent = psutil.cpu_percent()
        # psutil measures since the same thread's last call, and returns 0 to its first.
        thread = threading.get_ident()
        is_known, self._cpu_thread = self._cpu_thread == thread, thread
        return {"cpu_utilization_percentage": percent} if is_known else {}

    def _disk(self) -> dict[str, float]:
        usage = psutil.disk_usage(os.fspath(self._folder))
        return {
            "disk_usage_percentage": usage.percent,
            "disk_usage_megabytes": usage.used / _MEGABYTE,
            "disk_available_megabytes": usage.free / _MEGABYTE,
        }

    def _network(self) -> dict[str, float]:
        now, start = _network_counters(), self._network_start
        if now is None or start is None:
            return {}
        return {
            "network_receive_megabytes": (now.bytes_recv - start.bytes_recv) / _MEGABYTE,
            "network_transmit_megabytes": (now.bytes_sent - start.bytes_sent) / _MEGABYTE,
        }

    def _job(self) -> dict[str, float]:
        if self._process is None or self._samples % _PROCESS_EVERY:
            return {}
        return {"process_memory_megabytes": resident_bytes(self._process) / _MEGABYTE}


def resident_bytes(pid: int) -> int:
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


def _network_counters() -> Any:
    # None without a network card, although psutil's types exclude it.
    return psutil.net_io_counters()


def _memory() -> dict[str, float]:
    memory = psutil.virtual_memory()
    return {
        "system_memory_usage_megabytes": memory.used / _MEGABYTE,
        # Not memory.percent, which counts what is not available. MLflow's number must agree.
        "system_memory_usage_percentage": memory.used / memory.total * 100,
    }


def _or_nothing(read: Callable[[], dict[str, float]]) -> dict[str, float]:
    try:
        return read()
    except (psutil.Error, OSError, RuntimeError):
        return {}

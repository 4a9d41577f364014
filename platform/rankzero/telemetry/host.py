"""What the node's processor, memory, disk and network do; named and counted as MLflow's own monitor does.

Every reading is one psutil call; what a system cannot tell (no network card, the folder is
gone) is left out of that sample.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

MEGABYTE = 1e6
PROCESS_EVERY = 10  # samples; listing a process tree reads all of /proc


def usable_cores() -> list[int]:
    """Return the processor cores that this process may use."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


class HostSampler:
    """Reads the whole node's load, and the memory of one job's processes.

    `folder`: the disk to watch is the one it lies on. `process`: the pid at the root of the
    job's process tree; None: leave the job's memory out. The network counters start at zero.
    """

    def __init__(self, folder: Path = Path(os.sep), process: int | None = None) -> None:
        self._folder = folder
        self._process = process
        self._samples = 0
        self._cpu_thread: int | None = None
        self._network_start = _network_counters()

    def sample(self) -> dict[str, float]:
        """Return the readings of this moment; never raises."""
        metrics: dict[str, float] = {}
        for read in (self._cpu, _memory, self._disk, self._network, self._job):
            metrics.update(_or_nothing(read))
        self._samples += 1
        return metrics

    def _cpu(self) -> dict[str, float]:
        percent = psutil.cpu_percent()
        # psutil measures since the same thread's last call and answers 0 to a thread's first.
        thread = threading.get_ident()
        known, self._cpu_thread = self._cpu_thread == thread, thread
        return {"cpu_utilization_percentage": percent} if known else {}

    def _disk(self) -> dict[str, float]:
        usage = psutil.disk_usage(os.fspath(self._folder))
        return {
            "disk_usage_percentage": usage.percent,
            "disk_usage_megabytes": usage.used / MEGABYTE,
            "disk_available_megabytes": usage.free / MEGABYTE,
        }

    def _network(self) -> dict[str, float]:
        now, start = _network_counters(), self._network_start
        if now is None or start is None:
            return {}
        return {
            "network_receive_megabytes": (now.bytes_recv - start.bytes_recv) / MEGABYTE,
            "network_transmit_megabytes": (now.bytes_sent - start.bytes_sent) / MEGABYTE,
        }

    def _job(self) -> dict[str, float]:
        if self._process is None or self._samples % PROCESS_EVERY:
            return {}
        return {"process_memory_megabytes": resident_bytes(self._process) / MEGABYTE}


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and all below it, in bytes.

    Pages that several of them share (forked data workers) count once for each.
    Raises psutil.NoSuchProcess when `pid` is gone.
    """
    root = psutil.Process(pid)
    return sum(_resident_bytes(process) for process in [root, *root.children(recursive=True)])


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it ended since it was listed
        return 0


def _network_counters() -> Any:
    """Return psutil's counters, which are None without a network card, whatever their type says."""
    return psutil.net_io_counters()


def _memory() -> dict[str, float]:
    memory = psutil.virtual_memory()
    return {
        "system_memory_usage_megabytes": memory.used / MEGABYTE,
        # Not memory.percent, which counts from what is available: MLflow's number must agree.
        "system_memory_usage_percentage": memory.used / memory.total * 100,
    }


def _or_nothing(read: Callable[[], dict[str, float]]) -> dict[str, float]:
    try:
        return read()
    except (psutil.Error, OSError, RuntimeError):
        return {}

"""Kills workers that stay stopped after another one has ended.

The agent waits for all workers. One that SIGSTOP or a debugger has stopped at its end would keep it
waiting for ever: the ranks that could report it are gone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import psutil

# Rarely, because each look takes a core from a worker for a moment.
LOOK_SECONDS, LOOKS = 5.0, 12


def watch(pids: Sequence[int]) -> None:
    """Watch these workers from a thread until all of them have ended."""
    threading.Thread(target=kill_stopped, args=(pids,), name="stopped", daemon=True).start()


def kill_stopped(
    pids: Sequence[int], look_seconds: float = LOOK_SECONDS, looks: int = LOOKS
) -> None:
    """Return when all workers have ended. Kill those that are stopped for so many looks.

    They are left alone as long as none has ended. Looks count, and not time: somebody may stop and
    continue all of them.
    """
    living = {pid: psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)}
    seen = 0
    while living:
        time.sleep(look_seconds)
        stopped = []
        for pid, process in tuple(living.items()):
            status = psutil.STATUS_ZOMBIE
            with contextlib.suppress(psutil.NoSuchProcess):
                status = process.status()
            if status == psutil.STATUS_ZOMBIE:
                del living[pid]
            elif status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                stopped.append(process)
        seen = seen + 1 if stopped and len(living) < len(pids) else 0
        for process in stopped if seen >= looks else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

"""The processes that share a study, on one machine or several: which one leads, which are alive.

A process's name shows later, on the same machine, whether it is alive. For other machines it
writes heartbeats into the study's database.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rankzero.run_store import run_locks

if TYPE_CHECKING:
    from rankzero.tuning.study import Study

LEADER, BEAT = "leader", "beat "
DEAD_SECONDS = 180.0
"""A process of another machine without a heartbeat for so long is taken for dead."""
_BEAT_SECONDS = 20.0
_SETTLE_SECONDS = 0.2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def lead(study: Study, settle_seconds: float = _SETTLE_SECONDS) -> bool:
    """Become the leader if no live process leads; return whether this process leads.

    The leader trains the reference, confirms and decides. The others help with trials.
    """
    if not has_leader(study):
        # First the heartbeat: another machine may look at this moment.
        study.note(BEAT + own_name(), time.time())
        study.note(LEADER, own_name())
        # If two processes do this at the same time, the later one leads.
        time.sleep(settle_seconds)
    return leader(study) == own_name()


def leader(study: Study) -> str:
    """Return the leading process's name, or an empty text if none led yet."""
    return str(study.facts.get(LEADER, ""))


def has_leader(study: Study) -> bool:
    """Return whether a live process leads."""
    return is_alive(study, leader(study))


def is_alive(study: Study, member: str | None) -> bool:
    """Return whether a member is alive; on another machine, by its last heartbeat."""
    if not member:
        return False
    machine, pid, started = member.rsplit(" ", 2)
    if machine == _machine_name():
        return run_locks.process_start(int(pid)) == started != ""
    return time.time() - float(study.facts.get(BEAT + member, 0.0)) < DEAD_SECONDS


@contextlib.contextmanager
def heartbeats(study: Study) -> Iterator[None]:
    """Write heartbeats of this process during the block."""
    stop = threading.Event()

    def beat() -> None:
        while True:
            # The database may be unreachable for a while. Then the next heartbeat will do.
            with contextlib.suppress(Exception):
                study.note(BEAT + own_name(), time.time())
            if stop.wait(_BEAT_SECONDS):
                return

    thread = threading.Thread(target=beat, daemon=True, name="rankzero-heartbeat")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def own_name() -> str:
    """Return this process's name: its machine, its number, and the time of its start."""
    # The start separates two processes that had the same number one after the other.
    return f"{_machine_name()} {os.getpid()} {run_locks.process_start(os.getpid())}"


def _machine_name() -> str:
    """Return a name for the scope of process numbers: host name, boot and container."""
    # Process numbers start again with each boot, and each container has its own.
    boot, container = "", ""
    with contextlib.suppress(OSError):
        boot = _BOOT_ID.read_text()[:8]
    with contextlib.suppress(OSError):
        container = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    return "/".join([socket.gethostname(), boot, container])

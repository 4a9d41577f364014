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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rankzero.run_store import run_locks

LEADER, BEAT = "leader", "beat "
DEAD_SECONDS = 180.0
"""A process of another machine without a heartbeat for so long is taken for dead."""
_BEAT_SECONDS = 20.0
_SETTLE_SECONDS = 0.2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _FactStore(Protocol):
    """Facts that all members read and write."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return all facts."""

    def note(self, name: str, fact: Any) -> None:
        """Store a fact."""


class Members:
    """The processes that share a study.

    `settle_seconds`: how long a new leader waits for another one that writes its name as well.
    """

    def __init__(self, store: _FactStore, settle_seconds: float = _SETTLE_SECONDS) -> None:
        self._store, self._settle_seconds = store, settle_seconds

    def lead(self) -> bool:
        """Become the leader if no live process leads; return whether this process leads.

        The leader trains the reference, confirms and decides. The others help with trials.
        """
        if not self.has_leader:
            # First the heartbeat: another machine may look at this moment.
            self._store.note(BEAT + own_name(), time.time())
            self._store.note(LEADER, own_name())
            # Of two processes that do this at the same time, the later one leads.
            time.sleep(self._settle_seconds)
        return self.leader == own_name()

    @property
    def leader(self) -> str:
        """Return the leading process's name, or an empty text if none led yet."""
        return str(self._store.facts.get(LEADER, ""))

    @property
    def has_leader(self) -> bool:
        """Return whether a live process leads."""
        return self.is_alive(self.leader)

    def is_alive(self, member: str | None) -> bool:
        """Return whether a member is alive; on another machine, by its last heartbeat."""
        if not member:
            return False
        machine, pid, started = member.rsplit(" ", 2)
        if machine == _machine_name():
            return run_locks.process_start(int(pid)) == started != ""
        return time.time() - float(self._store.facts.get(BEAT + member, 0.0)) < DEAD_SECONDS

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Write heartbeats of this process during the block."""
        stop = threading.Event()

        def beat() -> None:
            while True:
                # The database may be unreachable for a while. Then the next heartbeat will do.
                with contextlib.suppress(Exception):
                    self._store.note(BEAT + own_name(), time.time())
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

"""The processes that share a study, on one machine or several: who leads, who still lives.

A process goes by a name that tells, later and on the same machine, whether it lives; to other machines it shows by a
beat in the study's database.
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

from rankzero.run_store import claims

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LEADER, BEAT = "leader", "beat "
BEAT_SECONDS, DEAD_SECONDS = (
    20.0,
    180.0,
)  # a process of another machine that was silent for so long is taken for dead
SETTLE_SECONDS = 0.2


class FactStore(Protocol):
    """Facts that all members read and write."""

    @property
    def facts(self) -> Mapping[str, Any]: ...

    def note(self, name: str, fact: Any) -> None: ...


class Members:
    """Those who share a study."""

    def __init__(self, board: FactStore) -> None:
        self._board = board

    def lead(self) -> bool:
        """Become the leader where there is none that lives; return whether this process leads.

        The leader trains the reference, confirms and decides; the others help with trials.
        """
        if not self.led:
            self._board.note(BEAT + name(), time.time())
            self._board.note(LEADER, name())
            time.sleep(SETTLE_SECONDS)  # of two that do this at once, the later one leads
        return self.leader == name()

    @property
    def leader(self) -> str:
        """Return the leading process's name, an empty text where there is none yet."""
        return str(self._board.facts.get(LEADER, ""))

    @property
    def led(self) -> bool:
        """Tell whether there is a leader who lives."""
        return self.live(self.leader)

    def live(self, member: str | None) -> bool:
        """Tell whether a member lives, as far as can be known."""
        if not member:
            return False
        if is_here(member):
            return lives(member)
        return time.time() - float(self._board.facts.get(BEAT + member, 0.0)) < DEAD_SECONDS

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Let other machines know that this process lives, for the duration of the block."""
        stop = threading.Event()
        thread = threading.Thread(
            target=self._beat, args=(stop,), daemon=True, name="rankzero-heartbeat"
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _beat(self, stop: threading.Event) -> None:
        while True:
            with contextlib.suppress(
                Exception
            ):  # a database that is away for a while: the next beat will do
                self._board.note(BEAT + name(), time.time())
            if stop.wait(BEAT_SECONDS):
                return


def name() -> str:
    """Return this process's name: machine, process number, when it started."""
    return f"{machine()} {os.getpid()} {claims.process_start(os.getpid())}"


def machine() -> str:
    """Return a word for where process numbers mean the same: host name, boot, and container."""
    boot, container = "", ""
    with contextlib.suppress(OSError):
        boot = BOOT_ID.read_text()[:8]
    with contextlib.suppress(OSError):
        container = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    return "/".join([socket.gethostname(), boot, container])


def host_of(member: str) -> str:
    """Return the host's name."""
    return member.partition("/")[0]


def is_here(member: str) -> bool:
    """Tell whether the process is on this machine, so that `lives` knows for sure."""
    return member.rpartition(" ")[0].rpartition(" ")[0] == machine()


def lives(member: str) -> bool:
    """Tell whether a process of this machine still lives."""
    pid, started = member.split(" ")[-2:]
    return claims.process_start(int(pid)) == started != ""

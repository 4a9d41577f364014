"""The processes that share a study, on one machine or several: which one leads, which are alive.

Each holds a lock of its own in the study's store, and the leader one more.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from typing import TYPE_CHECKING

from rankzero.errors import RunFailed
from rankzero.tuning.store_locks import StoreLocks, open_locks

if TYPE_CHECKING:
    from rankzero.tuning.study import Study

LEADER, MEMBER = "leader", "beat "
"""Facts of a study: the leader's name, and for each member when it began. Older versions wrote
heartbeats there."""


class LostLead(RunFailed):
    """Another process leads a study that this one led."""


class Members:
    """The members of a study, as one of them sees them."""

    def __init__(self, study: str, storage: str) -> None:
        self._study, self._storage = study, storage
        # Host and number are for people. The rest is another one in each process.
        self.own_name = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
        self._locks: StoreLocks | None = None
        self.leads = False
        """Whether this process took the lead, and has not left since."""

    def join(self) -> None:
        """Be alive to the other members until `close`, or this process's end."""
        self._open().take(self._number(self.own_name))

    def close(self) -> None:
        """Leave the study."""
        if self._locks is not None:
            self._locks.close()
            self._locks, self.leads = None, False

    def take_lead(self) -> bool:
        """Return whether this process leads from now on. False if another one does."""
        self.leads = self._open().take(self._number(LEADER))
        return self.leads

    def has_leader(self) -> bool:
        """Return whether another live process leads."""
        return self._open().is_taken(self._number(LEADER))

    def is_alive(self, member: str) -> bool:
        """Return whether a member is alive."""
        return member == self.own_name or self._open().is_taken(self._number(member))

    def _open(self) -> StoreLocks:
        # Late, because a reader of a study needs no right to write.
        if self._locks is None:
            self._locks = open_locks(self._storage)
        return self._locks

    def _number(self, name: str) -> int:
        # 62 bits: the end of a file's byte range must fit into 63.
        digest = hashlib.sha256(f"{self._study}\n{name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 2


def lead(study: Study) -> bool:
    """Become the leader if no live process leads; return whether this process leads.

    The leader trains the reference, confirms and decides. The others help with trials.
    """
    leads = study.members.take_lead()
    if leads:
        study.note(LEADER, study.members.own_name)
    return leads


def require_lead(study: Study) -> None:
    """Raise LostLead if this process led the study and another one leads it now."""
    # A server that restarts, or a link that is cut, ends the locks of a process that lives on.
    if study.members.leads and leader(study) != study.members.own_name:
        raise LostLead(
            f"another process leads study {study.name} since this one lost the database for a "
            "while: it decides"
        )


def leader(study: Study) -> str:
    """Return the leading process's name, or an empty text if none led yet or it has decided."""
    return str(study.facts.get(LEADER, ""))

"""Claims and locks on a run's folder.

    recorder.json   claim: which attempt is the latest, and which process writes its journal
    recorder-….live flock: the claim's recorder holds it, which shows that it lives; not empty once
                    it has begun
    recorder.lock   flock: which process delivers the node's journals (a courier, `rankzero sync`)
    launcher.lock   flock: which command launches the run's processes
    attempt.lock    flock for moments: a claim and the end of the attempt before exclude each other,
                    and so do two commands that create the run

A flock ends with the processes that hold it, however they die. Nodes other than 0 have their own
files, ``recorder-node_<i>.json`` and so on. A user with only read access can hold none of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from rankzero.events import LATEST
from rankzero.run_store import lock_files
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.lock_files import open_lock, try_lock

# A recorder that gets no processor time must not hold up the start of a training for longer.
_EXCLUSIVE_SECONDS = 0.2
# Without a heartbeat of a writer on another machine.
ABANDONED_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Claim:
    """The attempt that a run belongs to, and the process that writes its journal."""

    token: str
    host: str
    pid: int
    pid_started: str
    """When that process began, in the kernel's ticks, because pids are used again."""
    time: float
    events_offset: int
    """Bytes of journal that earlier attempts wrote."""
    namespace: str = ""
    """The process's namespace of pids, which a container has of its own. Not of old versions."""


_KINDS = (str, str, int, str, int | float, int, str)
"""The types of a claim's fields."""


def claim(folder: RunFolder, node: int, check: Callable[[Claim], object] = lambda _: None) -> Claim:
    """Make this process's attempt the run's latest. An older recorder sees that and stops.

    `check` gets the claim before, if there is one. It may raise to prevent this one.
    """
    with exclusive_end(folder):
        before = latest(folder, node)
        if before is not None:
            check(before)
        events = folder.events.stat().st_size if folder.events.exists() else 0
        mine = Claim(
            secrets.token_hex(8),
            socket.gethostname(),
            os.getpid(),
            _process_start(os.getpid()),
            time.time(),
            events,
            _namespace(),
        )
        # An older recorder keeps its lock on a file that nobody looks at any more.
        for left in folder.path.glob(f"{_claim_path(folder, node).stem}-{'?' * 16}.live"):
            left.unlink(missing_ok=True)
        os.close(open_lock(_live_path(folder, node, mine.token)))
        temporary = folder.path / f".recorder-{mine.token}"
        temporary.write_text(json.dumps(dataclasses.asdict(mine)), encoding="utf-8")
        # It is not synced to the disk, because after a crash of the machine no process needs it.
        temporary.replace(_claim_path(folder, node))
        return mine


def latest(folder: RunFolder, node: int) -> Claim | None:
    """Return the latest attempt's claim, or None if there is none, or one that is not ours."""
    try:
        fields = json.loads(_claim_path(folder, node).read_text(encoding="utf-8"))
        # A newer version's claim may have more fields.
        known = [name for name in Claim.__dataclass_fields__ if name in fields]
        found = Claim(**{name: fields[name] for name in known})
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    is_ours = (
        all(map(isinstance, vars(found).values(), _KINDS))
        and 0 <= found.events_offset < 1 << 63
        and 0 <= found.time < LATEST
        # It is a part of a file's name.
        and found.token.isascii()
        and found.token.isalnum()
    )
    return found if is_ours else None


def is_known(folder: RunFolder) -> bool:
    """Return whether a process has begun the run or claimed it."""
    return folder.events.exists() or latest(folder, 0) is not None


def writer_lives(folder: RunFolder) -> bool:
    """Return whether the journal's writer lives, or if that is hidden, whether it wrote lately."""
    found = latest(folder, 0)
    if found is None:
        return False
    if is_local(found):
        if found.namespace in ("", _namespace()):
            return is_alive(found)
        # The pids of another container mean nothing here. Its lock does, if it can be opened.
        live = _live_path(folder, 0, found.token)
        if os.access(live, os.W_OK) or not live.exists():
            return has_live_recorder(folder)
    return time.time() - last_heartbeat(folder) < ABANDONED_SECONDS


def is_local(claim: Claim) -> bool:
    """Return whether a process of this machine made the claim."""
    return claim.host == socket.gethostname()


def is_alive(claim: Claim) -> bool:
    """Return whether the process that made the claim lives, on this machine."""
    return _process_start(claim.pid) == claim.pid_started != ""


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def last_heartbeat(folder: RunFolder) -> float:
    """Return when a journal of the run was last written, or else its run.json."""
    journals = (folder.events, *folder.path.glob("system-node_*.jsonl"))
    written = [path.stat().st_mtime for path in journals if path.exists()]
    return max(written, default=0.0) or (folder.path / "run.json").stat().st_mtime


def directory(folder: RunFolder) -> tuple[int, int] | None:
    """Return the identity of the path's directory. It changes if another one takes its place."""
    try:
        found = folder.path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _process_start(pid: int) -> str:
    """Return when the process began, in the kernel's ticks, or "" if it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    # A zombie counts as dead. Field 22 of proc(5), the start time, is the 20th after the name.
    return "" if fields[0] in "ZX" else fields[19]


def acquire(folder: RunFolder, node: int) -> int | None:
    """Take the lock that permits delivery; return its file descriptor, or None if it is taken.

    The lock ends when every process that inherited the descriptor has closed it or died.
    """
    descriptor = open_lock(_lock_path(folder, node))
    if try_lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def lock(folder: RunFolder, node: int) -> contextlib.AbstractContextManager[bool]:
    """Hold the lock that permits delivery if it is free; yield whether it is held."""
    return lock_files.lock(_lock_path(folder, node))


def is_recording(folder: RunFolder) -> bool:
    """Return whether a process holds the lock that permits delivery of node 0."""
    with contextlib.suppress(OSError), lock(folder, 0) as free:
        return not free
    return False


def announce_recorder(folder: RunFolder, node: int, token: str) -> int | None:
    """Hold a lock that shows this recorder is alive, whether it delivers or not.

    Return its file descriptor. None means that the claim is not the latest any more, or that
    another process looks at this moment; then try again.
    """
    try:
        descriptor = os.open(_live_path(folder, node, token), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    found = latest(folder, node)
    if try_lock(descriptor) and found is not None and found.token == token:
        with contextlib.suppress(OSError):  # A full disk only makes others wait for longer.
            os.write(descriptor, b".")
        return descriptor
    os.close(descriptor)
    return None


def has_announced(folder: RunFolder, node: int = 0) -> bool:
    """Return whether a node's latest recorder has ever held its lock. It may be dead by now."""
    found = latest(folder, node)
    try:
        return found is not None and _live_path(folder, node, found.token).stat().st_size > 0
    except OSError:
        return False


def has_live_recorder(folder: RunFolder, node: int = 0) -> bool:
    """Return whether a node's latest recorder lives. Several processes may ask at once.

    False for a user who may not write the run.
    """
    found = latest(folder, node)
    if found is None:
        return False
    with contextlib.suppress(OSError):
        descriptor = os.open(_live_path(folder, node, found.token), os.O_RDWR | os.O_NOFOLLOW)
        try:
            return not try_lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)
    return False


def exclusive_end(folder: RunFolder) -> contextlib.AbstractContextManager[object]:
    """Exclude the start of an attempt and the end of the attempt before from each other.

    Waits only a moment, then continues without the lock.
    """
    return lock_files.lock(folder.path / "attempt.lock", seconds=_EXCLUSIVE_SECONDS)


def _claim_path(folder: RunFolder, node: int) -> Path:
    return folder.path / ("recorder.json" if node == 0 else f"recorder-node_{node}.json")


def _lock_path(folder: RunFolder, node: int) -> Path:
    return _claim_path(folder, node).with_suffix(".lock")


def _live_path(folder: RunFolder, node: int, token: str) -> Path:
    return folder.path / f"{_claim_path(folder, node).stem}-{token}.live"

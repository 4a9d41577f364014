"""Who launches a run, and who records it: one recorder a node at a time, the newest attempt's, or `rankzero sync`."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rankzero.run_store.folder import RunFolder

TURN_SECONDS = 0.2
ABANDONED_SECONDS = 600.0  # without a word from another machine


@dataclasses.dataclass(frozen=True)
class Claim:
    """Which attempt the run belongs to: the process that writes the journal, and when it began to."""

    token: str
    host: str
    pid: int
    pid_started: str
    """When that process began, in the kernel's ticks: pids are used again."""
    time: float
    events_offset: int
    """Bytes of journal that earlier attempts left."""


def claim(folder: RunFolder, node: int) -> Claim:
    """Make this process's attempt the run's latest; an older recorder sees it and stops."""
    with exclusive_end(folder):
        return _claim(folder, node)


def claim_unless(folder: RunFolder, is_busy: Callable[[Claim], bool]) -> Claim | None:
    """Do the same for node 0, unless the latest claim is busy; return that then."""
    with exclusive_end(folder):
        found = latest(folder, 0)
        if found is not None and is_busy(found):
            return found
        _claim(folder, 0)
    return None


def _claim(folder: RunFolder, node: int) -> Claim:
    events = folder.events.stat().st_size if folder.events.exists() else 0
    mine = Claim(
        secrets.token_hex(8),
        socket.gethostname(),
        os.getpid(),
        process_start(os.getpid()),
        time.time(),
        events,
    )
    temporary = folder.path / f".recorder-{mine.token}"
    temporary.write_text(json.dumps(dataclasses.asdict(mine)), encoding="utf-8")
    temporary.replace(
        _claim_path(folder, node)
    )  # not synced to the disk: after a crash of it nobody asks
    return mine


def latest(folder: RunFolder, node: int) -> Claim | None:
    """Return the latest attempt's claim; None where there never was one."""
    try:
        return Claim(**json.loads(_claim_path(folder, node).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def is_known(folder: RunFolder) -> bool:
    """Tell whether somebody has begun the run, or has said that it will."""
    return folder.events.exists() or latest(folder, 0) is not None


def writer_lives(folder: RunFolder) -> bool:
    """Tell whether the process that writes the journal lives; of one on another machine, whether it wrote of late."""
    found = latest(folder, 0)
    if found is None:
        return False
    return (
        is_alive(found)
        if is_local(found)
        else time.time() - last_heartbeat(folder) < ABANDONED_SECONDS
    )


def is_local(claim: Claim) -> bool:
    """Tell whether a process of this machine made the claim."""
    return claim.host == socket.gethostname()


def is_alive(claim: Claim) -> bool:
    """Tell whether the process of this machine lives that made the claim."""
    return process_start(claim.pid) == claim.pid_started != ""


def last_heartbeat(folder: RunFolder) -> float:
    """Return when the run last gave a sign of life: when any of its journals, or else its identity, was written to."""
    journals = (folder.events, *folder.path.glob("system-node_*.jsonl"))
    written = [path.stat().st_mtime for path in journals if path.exists()]
    return max(written, default=0.0) or (folder.path / "run.json").stat().st_mtime


def directory(folder: RunFolder) -> tuple[int, int] | None:
    """Return which directory the folder's path leads to: another, once a folder was moved away and made anew."""
    try:
        found = folder.path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def process_start(pid: int) -> str:
    """Return when the process began, in the kernel's ticks; an empty text when it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def acquire(folder: RunFolder, node: int) -> int | None:
    """Take the right to deliver; return what holds it, None while somebody else does.

    It is a file descriptor: the right ends when it is closed by every process that inherited it, however those die.
    """
    descriptor = os.open(_lock_path(folder, node), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
    if _try_lock(descriptor):
        return descriptor
    os.close(descriptor)
    return None


@contextlib.contextmanager
def lock(folder: RunFolder, node: int) -> Iterator[bool]:
    """Hold the right to deliver, if it is free; yield whether it is held."""
    descriptor = acquire(folder, node)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_recording(folder: RunFolder, node: int = 0) -> bool:
    """Tell whether somebody holds the right to deliver."""
    with contextlib.suppress(OSError), lock(folder, node) as free:
        return not free
    return False


def announce_recorder(folder: RunFolder, node: int, token: str) -> int | None:
    """Let others see that the recorder of this claim lives, right or no right; return what says so, as of `acquire`.

    None where the claim is not the latest any more, and where somebody looks at that moment: then try again.
    """
    try:
        descriptor = os.open(_claim_path(folder, node), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    found = latest(folder, node)
    if _try_lock(descriptor) and found is not None and found.token == token:
        return descriptor
    os.close(descriptor)
    return None


def has_live_recorder(folder: RunFolder, node: int = 0) -> bool:
    """Tell whether the recorder of the latest claim lives. Any number may ask at a time."""
    with contextlib.suppress(OSError):
        descriptor = os.open(_claim_path(folder, node), os.O_RDONLY)
        try:
            return not _try_lock(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)
    return False


@contextlib.contextmanager
def launching(folder: RunFolder, kind: int) -> Iterator[bool]:
    """Hold the right to launch the run's processes, a flock of that `kind`; yield whether it is held.

    However this process dies, the right ends with it.
    """
    descriptor = os.open(
        folder.path / "launcher.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666
    )
    try:
        yield _try_lock(descriptor, kind)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive_end(folder: RunFolder) -> Iterator[None]:
    """Keep the start of an attempt apart from the end that a recorder writes for the attempt before.

    Waits a moment only: a recorder that gets no processor time must not hold up the training.
    """
    descriptor = os.open(folder.path, os.O_RDONLY)
    try:
        deadline = time.monotonic() + TURN_SECONDS
        while not _try_lock(descriptor) and time.monotonic() < deadline:
            time.sleep(0.002)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: then nothing can be said, and delivering twice does no harm
    return True


def _claim_path(folder: RunFolder, node: int) -> Path:
    return folder.path / ("recorder.json" if node == 0 else f"recorder-node_{node}.json")


def _lock_path(folder: RunFolder, node: int) -> Path:
    return folder.path / ("recorder.lock" if node == 0 else f"recorder-node_{node}.lock")

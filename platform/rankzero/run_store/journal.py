"""A run's journals: append events, read them, follow them.

The journal on the disk is the truth about a run. Each file has one writer, which appends whole
lines with checksums. Readers skip the part of a line that a killed writer left, and the next writer
ends it. docs/guarantees.md has the order in which journals and other files reach the disk.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rankzero.events import (
    CheckpointSaved,
    Event,
    Noticed,
    ParamsLogged,
    PicturesTaken,
    RunEnded,
    RunStarted,
    StepsLogged,
    TagsSet,
    decode,
    encode_line,
)
from rankzero.run_store import disk

# The most that a reader holds in memory at a time, and a writer while it cannot write.
READ_BYTES, _MOST_WAITING_BYTES = 1 << 20, 64 << 20
# Between writes of steps: a run that reports each step does not pay one write for each.
_STEPS_SECONDS = 0.5
_NEVER_LOST, _SYNCED = (RunStarted, CheckpointSaved, RunEnded), (RunStarted, RunEnded)
_RETRY_SECONDS = 0.2
_MILESTONES = tuple(
    f'{{"event":"{kind.__name__}"'.encode()
    for kind in (RunStarted, RunEnded, ParamsLogged, TagsSet)
)
_EVALUATED = b'{"event":"Evaluated"'


class Journal:
    """Appends events to a file. Calling it never raises: telemetry must not end a training.

    The operating system gets events at once, so they survive the death of the process. StepsLogged
    are the exception: they may wait half a second, for the next event or `flush`. RunStarted and
    RunEnded are also synced to the disk. `sync` does it for all events before, and first for the
    pictures that they name.

    While the disk is full, lines wait in memory and each event tries again. Beyond
    `most_waiting_bytes`, all events but RunStarted, CheckpointSaved and RunEnded are lost. `lost`
    counts them, and so does the journal once there is room. An event that cannot be written is lost
    alone. `problems` gives the reason, and the first error of a sync.
    """

    def __init__(
        self,
        path: Path,
        *,
        most_waiting_bytes: int = _MOST_WAITING_BYTES,
        write: Callable[[int, bytearray], int] = os.write,
        fsync: Callable[[int], None] = os.fsync,
    ) -> None:
        is_new = not path.exists()
        self._descriptor = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644
        )
        self._most_waiting, self._os_write, self._fsync = most_waiting_bytes, write, fsync
        # A line that a killed writer left unfinished must not swallow the first new one.
        self._waiting = bytearray(b"" if _is_whole(self._descriptor) else b"\n")
        self._steps_written = 0.0
        self.lost = self._uncounted = 0
        self.problems: list[str] = []
        self._is_unconfirmed, self._folder = False, path.parent
        self._pictures: dict[Path, None] = {}
        if is_new:
            self._confirm(lambda: disk.sync(self._folder))

    def __call__(self, event: Event) -> None:
        try:
            if len(self._waiting) > self._most_waiting and not isinstance(event, _NEVER_LOST):
                self.flush()
                if len(self._waiting) > self._most_waiting:
                    self.lost += 1
                    self._uncounted += 1
                    return
            if isinstance(event, PicturesTaken):
                # Before its line is written: another thread may sync at any time.
                self._pictures[self._folder / event.path] = None
            self._waiting += encode_line(event)
            if self._is_due(event):
                self.flush()
            if isinstance(event, _SYNCED):
                self.sync()
        except Exception as error:
            # One odd value must not end the journal, and the journal must not end the training.
            self.problems.append(
                f"a {type(event).__name__} is lost, since it cannot be written: {error}"
            )

    def flush(self) -> None:
        """Hand what waits in memory to the operating system."""
        with contextlib.suppress(OSError):
            self._drain()

    def sync(self) -> None:
        """Sync what was handed to the operating system. Any thread may call this."""
        if self._descriptor < 0:
            return
        # Not where they are written: the step would wait for the disk.
        pictures = tuple(self._pictures)
        try:
            disk.sync_all(pictures, self._folder)
        except OSError as error:
            self.problems.append(
                f"the disk did not confirm pictures ({error}): after a power loss, some may be "
                "missing"
            )
        for path in pictures:
            self._pictures.pop(path, None)
        self._confirm(lambda: self._fsync(self._descriptor))

    def disown(self) -> None:
        """Write nothing any more: the process that this one was forked from does."""
        os.close(self._descriptor)
        self._descriptor, self._waiting = -1, bytearray()

    def close(self, patience_seconds: float = 0.0) -> None:
        """Write what waits, and close the file. Raises OSError if something stays unwritten.

        A disk that refuses is tried again for `patience_seconds`.
        """
        until = time.monotonic() + patience_seconds
        is_late = bool(self._waiting)
        try:
            while self._waiting:
                try:
                    self._drain()
                except OSError:
                    if time.monotonic() >= until:
                        raise
                    time.sleep(_RETRY_SECONDS)
            if is_late:
                self.sync()
        finally:
            os.close(self._descriptor)
            # Another file may get the number. A thread that is late must not write to that one.
            self._descriptor = -1

    def _confirm(self, sync: Callable[[], None]) -> None:
        try:
            sync()
        except OSError as error:
            # A later sync may succeed although this one's data are lost: the system drops what it
            # could not write. So the first error is reported, and no success takes it back.
            if not self._is_unconfirmed:
                self._is_unconfirmed = True
                self.problems.append(
                    f"the disk did not confirm the journal ({error}): after a power loss, "
                    "events may be missing"
                )

    def _is_due(self, event: Event) -> bool:
        """Return whether to write now. Events of one window have one time, and go together."""
        if not isinstance(event, StepsLogged) or not event.times:
            return True
        since = event.times[-1] - self._steps_written
        if 0 < since < _STEPS_SECONDS:
            return False
        self._steps_written = event.times[-1]
        return True

    def _drain(self) -> None:
        while self._waiting:
            written = self._os_write(self._descriptor, self._waiting)
            del self._waiting[:written]
            if not self._waiting and self._uncounted:
                text = (
                    f"the disk was full for so long that {self._uncounted:,} events, "
                    "of metrics above all, are lost"
                )
                self._waiting += encode_line(Noticed(time.time(), text))
                self._uncounted = 0


class JournalChunk(NamedTuple):
    """A part of a journal."""

    events: list[Event]
    offset: int
    """The offset behind it."""
    foreign: int = 0
    """How many of its lines are no events."""
    checksum: int = 0
    """CRC-32 of the journal up to the offset, if `take` was given that of the bytes before."""


def take(
    path: Path, offset: int = 0, limit_bytes: int = READ_BYTES, checksum: int = 0
) -> JournalChunk:
    """Return what follows `offset`: about `limit_bytes` at most, but always a whole line.

    A line that is no event (its writer died, or another program wrote it) is skipped and counted.
    """
    whole = _whole_lines(path, offset, limit_bytes)
    events, foreign = [], 0
    for line in whole.decode("utf-8", errors="replace").split("\n"):
        try:
            events.append(decode(line))
        # An empty line comes from closing off what a killed writer left, and is none to report.
        except ValueError:
            foreign += bool(line.strip())
    return JournalChunk(events, offset + len(whole), foreign, zlib.crc32(whole, checksum))


def checksum_of_first(path: Path, size: int) -> int | None:
    """Return the CRC-32 of the first `size` bytes, or None if the file has fewer.

    Costs a read of them all: 0.1 s for 100 MB from memory.
    """
    checksum = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while size and (chunk := file.read(min(size, READ_BYTES))):
            checksum, size = zlib.crc32(chunk, checksum), size - len(chunk)
    return None if size else checksum


def read(path: Path, offset: int = 0, limit_bytes: int = READ_BYTES) -> tuple[list[Event], int]:
    """Return the events after `offset`, and the offset behind them."""
    chunk = take(path, offset, limit_bytes)
    return chunk.events, chunk.offset


def read_all(path: Path, offset: int = 0) -> Iterator[Event]:
    """Yield every event that the file holds now, after `offset`."""
    while True:
        events, behind = read(path, offset)
        yield from events
        if behind == offset:
            return
        offset = behind


def newest_start(path: Path) -> RunStarted | None:
    """Return the newest attempt's start, or None without one."""
    return [None, *(event for event in milestones(path) if isinstance(event, RunStarted))][-1]


def milestones(path: Path) -> Iterator[Event]:
    """Yield the attempts' starts and ends, later params and tags, and evaluations that are best.

    An attempt without an end has its last event instead. Decodes no others: all events of a long
    run take seconds, and its lines 0.1 s for 100 MB.
    """
    before = b""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            if line.startswith(_MILESTONES) or (
                line.startswith(_EVALUATED) and b'},"best":true' in line
            ):
                # An attempt has no end if its machine went down.
                is_open = line.startswith(_MILESTONES[0]) and not before.startswith(_MILESTONES)
                for one in (before, line) if is_open else (line,):
                    # A line may be damaged. Then that of the attempt before counts.
                    with contextlib.suppress(ValueError):
                        yield decode(one.decode())
            before = line


def finish_line(path: Path) -> None:
    """End a line that its writer left unfinished, so that readers can pass it.

    Nothing may still write the journal. Raises OSError while the disk is full.
    """
    if path.exists():
        Journal(path).close()


def _whole_lines(path: Path, offset: int, limit_bytes: int) -> bytes:
    chunk = b""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        # One event may be longer than the limit, and half of a line is no event.
        chunk = file.read(limit_bytes)
        if b"\n" not in chunk and len(chunk) == limit_bytes:
            chunk += file.readline()
    return chunk[: chunk.rfind(b"\n") + 1]


def _is_whole(descriptor: int) -> bool:
    """Return whether a journal has no unfinished line at its end."""
    size = os.fstat(descriptor).st_size
    return not size or os.pread(descriptor, 1, size - 1) == b"\n"

"""A run's journals: append events, read them, follow them.

The journal on the disk is the truth about a run. Each file has one writer, which appends whole
lines. Readers skip the part of a line that a killed writer left, and the next writer ends it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rankzero.events import (
    CheckpointSaved,
    Event,
    Noticed,
    RunEnded,
    RunStarted,
    StepsLogged,
    decode,
    encode,
)

# What a reader holds in memory at a time, and a writer while it cannot write.
READ_BYTES, MOST_WAITING_BYTES = 1 << 20, 64 << 20
# Between writes of steps: a run that reports each step does not pay one write for each.
STEPS_SECONDS = 0.5
MILESTONES = (RunStarted, CheckpointSaved, RunEnded)


class Journal:
    """Appends events to a file. Calling it never raises: telemetry must not end a training.

    The operating system gets events at once, so they survive the death of the process. StepsLogged
    are the exception: they may wait half a second, for the next event or `flush`. RunStarted,
    CheckpointSaved and RunEnded are also synced to the disk.

    While the disk is full, lines wait in memory and each event tries again. Beyond
    `most_waiting_bytes`, other events than those three are lost. `lost` counts them, and so does
    the journal once there is room. An event that cannot be written is lost alone, and `problems`
    gives the reason.
    """

    def __init__(
        self,
        path: Path,
        *,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
        write: Callable[[int, bytearray], int] = os.write,
        fsync: Callable[[int], None] = os.fsync,
    ) -> None:
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644
        )
        self._most_waiting, self._os_write, self._fsync = most_waiting_bytes, write, fsync
        # A line that a killed writer left unfinished must not swallow the first new one.
        self._waiting = bytearray() if _ends_with_newline(path) else bytearray(b"\n")
        self._steps_written = 0.0
        self.lost = self._uncounted = 0
        self.problems: list[str] = []

    def __call__(self, event: Event) -> None:
        try:
            self._append(event)
        except Exception as error:
            # One odd value must not end the journal, and the journal must not end the training.
            self.problems.append(
                f"a {type(event).__name__} is lost, since it cannot be written: {error}"
            )

    def flush(self) -> None:
        """Hand what waits in memory to the operating system."""
        with contextlib.suppress(OSError):
            self._drain()

    def close(self) -> None:
        """Write what waits, and close the file. Raises OSError if something stays unwritten."""
        try:
            self._drain()
        finally:
            os.close(self._descriptor)

    def _append(self, event: Event) -> None:
        is_milestone = isinstance(event, MILESTONES)
        if len(self._waiting) > self._most_waiting and not is_milestone:
            self.flush()
            if len(self._waiting) > self._most_waiting:
                self.lost += 1
                self._uncounted += 1
                return
        self._waiting += _line(event)
        if self._is_due(event):
            self.flush()
        if is_milestone:
            # A network file system may report a full disk only here. The journal continues.
            with contextlib.suppress(OSError):
                self._fsync(self._descriptor)

    def _is_due(self, event: Event) -> bool:
        """Return whether to write now. Events of one window have one time, and go together."""
        if not isinstance(event, StepsLogged) or not event.times:
            return True
        since = event.times[-1] - self._steps_written
        if 0 < since < STEPS_SECONDS:
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
                self._waiting += _line(Noticed(time.time(), text))
                self._uncounted = 0


class JournalChunk(NamedTuple):
    """A part of a journal: its events, the offset behind it, and its lines that are no events."""

    events: list[Event]
    offset: int
    foreign: int = 0


def take(path: Path, offset: int = 0, limit_bytes: int = READ_BYTES) -> JournalChunk:
    """Return what follows `offset`: about `limit_bytes` at most, but always a whole line.

    A line that is no event (its writer died, or another program wrote it) is skipped and counted.
    """
    lines, behind = _lines(path, offset, limit_bytes)
    events, foreign = [], 0
    for line in lines:
        try:
            events.append(decode(line))
        # An empty line comes from closing off what a killed writer left, and is none to report.
        except ValueError:
            foreign += bool(line.strip())
    return JournalChunk(events, behind, foreign)


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


def finish_line(path: Path) -> None:
    """End a line that its writer left unfinished, so that readers can pass it.

    Nothing may still write the journal. Raises OSError while the disk is full.
    """
    if path.exists():
        Journal(path).close()


def _line(event: Event) -> bytes:
    return (encode(event) + "\n").encode()


def _lines(path: Path, offset: int, limit_bytes: int) -> tuple[list[str], int]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return [], offset
    with file:
        file.seek(offset)
        # One event may be longer than the limit, and half of a line is no event.
        chunk = file.read(limit_bytes)
        if b"\n" not in chunk and len(chunk) == limit_bytes:
            chunk += file.readline()
        whole = chunk[: chunk.rfind(b"\n") + 1]
    return whole.decode("utf-8", errors="replace").split("\n"), offset + len(whole)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"

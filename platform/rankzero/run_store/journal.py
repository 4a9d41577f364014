"""A run's journals: append events, read them, follow them.

The journal on disk is the truth about a run. Each file has one writer, which appends whole
lines; what a killed writer leaves of a last line is skipped by readers and closed off by
the next writer.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
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

READ_BYTES = 1 << 20  # what a reader holds in memory at a time
MOST_WAITING_BYTES = 64 << 20  # what a writer holds while it cannot write
MILESTONES = (RunStarted, CheckpointSaved, RunEnded)
STEPS_SECONDS = (
    0.5  # between writes of steps: a run that reports each step does not pay a write for each
)


class Journal:
    """Appends events to a file. Calling it never raises: telemetry must not end a training.

    Events are handed to the operating system at once, so they survive the death of the process; of
    StepsLogged only those a while after the last, others wait in memory for the next event or `flush`.
    RunStarted, CheckpointSaved and RunEnded are also synced to the disk. While the disk is
    full, lines wait in memory, and the next event tries again; past `MOST_WAITING_BYTES` events other than those
    three are lost, and counted: in `lost`, and in the journal once there is room. An event that cannot be written
    is lost alone, and `problems` says so.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644
        )
        self._waiting = bytearray() if _ends_with_newline(path) else bytearray(b"\n")
        self._steps_written = 0.0
        self.lost = self._untold = 0
        self.problems: list[str] = []

    def __call__(self, event: Event) -> None:
        try:
            self._append(event)
        except Exception as error:
            # One odd value must not end the journal, and the journal must not end the training.
            self.problems.append(
                f"a {type(event).__name__} is lost, since it cannot be written: {error}"
            )

    def _append(self, event: Event) -> None:
        if self._has_no_room_for(event):
            self.lost += 1
            self._untold += 1
            return
        self._waiting += _line(event)
        if self._is_due(event):
            self._write()
        if isinstance(event, MILESTONES):
            with contextlib.suppress(
                OSError
            ):  # network file systems tell of a full disk here; the journal goes on
                os.fsync(self._descriptor)

    def flush(self) -> None:
        """Hand what waits in memory to the operating system."""
        self._write()

    def close(self) -> None:
        """Write what waits, and close the file. Raises OSError where something stays unwritten."""
        try:
            self._drain()
        finally:
            os.close(self._descriptor)

    def _has_no_room_for(self, event: Event) -> bool:
        if len(self._waiting) <= MOST_WAITING_BYTES or isinstance(event, MILESTONES):
            return False
        self._write()
        return len(self._waiting) > MOST_WAITING_BYTES

    def _is_due(self, event: Event) -> bool:
        """Tell whether to write now. What ends at the same time, as the events of one window do, goes together."""
        if not isinstance(event, StepsLogged) or not event.times:
            return True
        since = event.times[-1] - self._steps_written
        if 0 < since < STEPS_SECONDS:
            return False
        self._steps_written = event.times[-1]
        return True

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            self._drain()

    def _drain(self) -> None:
        while self._waiting:
            written = os.write(self._descriptor, self._waiting)
            del self._waiting[:written]
            if not self._waiting and self._untold:
                text = f"the disk was full for so long that {self._untold:,} events, of metrics above all, are lost"
                self._waiting += _line(Noticed(time.time(), text))
                self._untold = 0


class JournalChunk(NamedTuple):
    """What a piece of a journal holds: its events, the offset behind it, and how many of its lines are no events."""

    events: list[Event]
    offset: int
    foreign: int = 0


def take(path: Path, offset: int = 0, limit_bytes: int = READ_BYTES) -> JournalChunk:
    """Return what stands after `offset`: about `limit_bytes` at most, but always a whole line.

    A line that is no event (torn by the death of its writer, or somebody else's) is passed over and counted.
    """
    lines, behind = _lines(path, offset, limit_bytes)
    events, foreign = [], 0
    for line in lines:
        try:
            events.append(decode(line))
        except ValueError:
            foreign += bool(line.strip())
    return JournalChunk(events, behind, foreign)


def read(path: Path, offset: int = 0, limit_bytes: int = READ_BYTES) -> tuple[list[Event], int]:
    """Return the events after `offset` and the offset behind them; ([], offset) when there is nothing new."""
    taken = take(path, offset, limit_bytes)
    return taken.events, taken.offset


def read_all(path: Path, offset: int = 0) -> Iterator[Event]:
    """Yield every event that the file holds now, after `offset`."""
    while True:
        events, behind = read(path, offset)
        yield from events
        if behind == offset:
            return
        offset = behind


def _line(event: Event) -> bytes:
    return (encode(event) + "\n").encode()


def _lines(path: Path, offset: int, limit_bytes: int) -> tuple[list[str], int]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return [], offset
    with file:
        file.seek(offset)
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

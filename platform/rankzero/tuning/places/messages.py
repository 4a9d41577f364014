"""Messages between a search and its host on other machines, as lines of text.

They are lines because Slurm's srun passes on whole lines. They are pickled because both ends are
this program, and the same user started both. Slurm's accounts protect the way. Ray pickles, too,
and trusts everybody who reaches the cluster.

All machines of a trial have one connection: each gets what the search sends, and their lines mix.

    rankzero:1:+gASVlgAAAAAA…    a part of a message of machine 1; more follow
    rankzero:1:.AAB9lC4=         its last part
"""

from __future__ import annotations

import base64
import dataclasses
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rankzero.launch.agent import Topology
from rankzero.tuning.trials.describe import ExperimentDescription, Question

# Other lines are the words of a cluster's own programs.
_MARK = b"rankzero:"
_CHUNK_BYTES = 1 << 20
# srun cuts lines of 1,024 bytes and more, and lines of other machines would come in between.
_PART_BYTES = 900
_MORE, _LAST = b"+", b"."


@dataclasses.dataclass(frozen=True)
class Start:
    """The search's first message."""

    libraries: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Started:
    """The first message of each machine of a host."""

    machine: str
    version: str


@dataclasses.dataclass(frozen=True)
class Run:
    """A request to run a trial; `Change` and in the end `Ended` follow."""

    entry: Callable[[Any], str]
    topology: Topology
    """All processes of the trial; each machine starts its part."""
    request: Any
    logs: Path
    folder: Path
    """On the search's machine. Paths in `request` may lie in it."""
    files: Mapping[str, bytes]
    """Its content."""


@dataclasses.dataclass(frozen=True)
class Signal:
    """A signal for the trial, and files to write into its folder before."""

    number: signal.Signals
    files: Mapping[str, bytes]


@dataclasses.dataclass(frozen=True)
class Change:
    """Content of a file in the trial's folder, from a byte on."""

    name: str
    begin: int
    content: bytes


@dataclasses.dataclass(frozen=True)
class Ended:
    """The trial has ended on one machine, and its folder has come over from there."""

    was_lost: bool


# A question gets a description or an error.
_Answer = ExperimentDescription | Exception
Message = Start | Started | Question | _Answer | Run | Signal | Change | Ended


class Lines:
    """Both directions of a connection, by two file descriptors that stay the caller's.

    `number`: this machine's among those of a host. The search has none, and writes 0.
    """

    def __init__(self, reading: int, writing: int, number: int = 0) -> None:
        self.reading, self._writing, self._number = reading, writing, number
        self._left, self._begun = b"", dict[bytes, list[bytes]]()

    def send(self, message: Message) -> None:
        """Write a message; wait until the other end has room. Raises OSError without one."""
        text = base64.b64encode(pickle.dumps(message))
        begins, head = range(0, len(text), _PART_BYTES), b"%s%d:" % (_MARK, self._number)
        *others, last = (text[begin : begin + _PART_BYTES] for begin in begins)
        lines = [*(_MORE + part for part in others), _LAST + last]
        left = memoryview(b"".join(head + line + b"\n" for line in lines))
        while left:
            left = left[os.write(self._writing, left) :]

    def receive(self, seconds: float | None = 0.0) -> Sequence[Message]:
        """Return the messages that have arrived, after at most `seconds`; None: without end.

        Raises EOFError if the other end is gone and has left nothing.
        """
        messages = list[Message]()
        until = time.monotonic() + (seconds or 0.0)
        while not messages and wait(
            [self.reading], None if seconds is None else max(0.0, until - time.monotonic())
        ):
            try:
                content = os.read(self.reading, _CHUNK_BYTES)
            except ConnectionError:
                content = b""
            if not content:
                raise EOFError
            *lines, self._left = (self._left + content).split(b"\n")
            whole = map(self._joined, [line for line in lines if line.startswith(_MARK)])
            # From the user's own process: see the top of this file.
            messages = [pickle.loads(base64.b64decode(text)) for text in whole if text]  # noqa: S301
        return messages

    def _joined(self, line: bytes) -> bytes:
        """Return the text of a message with its last part, and nothing before that."""
        number, _, text = line[len(_MARK) :].partition(b":")
        self._begun.setdefault(number, []).append(text[1:])
        return b"".join(self._begun.pop(number)) if text[:1] == _LAST else b""

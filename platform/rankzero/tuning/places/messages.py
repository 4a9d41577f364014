"""Messages between a search and its host on another machine, as lines of text.

They are lines because Slurm's srun passes on whole lines. They are pickled because both ends are
this program, and the same user started both. Slurm's accounts protect the way. Ray pickles, too,
and trusts everybody who reaches the cluster.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rankzero.launch.agent import Topology

# Other lines are the words of a cluster's own programs.
_MARK = b"rankzero:"
_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Start:
    """The search's first message."""

    version: str
    libraries: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Started:
    """The host's first message."""

    machine: str
    version: str


@dataclasses.dataclass(frozen=True)
class Describe:
    """A request to read the user's experiment; `Answer` follows."""

    reference: str
    given: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The description of an experiment, or the error of reading it."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Run:
    """A request to run a trial; `Change` and in the end `Ended` follow."""

    entry: Callable[[Any], str]
    topology: Topology
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
    """The trial has ended, and its folder has come over."""

    was_lost: bool


Message = Start | Started | Describe | Answer | Run | Signal | Change | Ended


class Lines:
    """Both directions of a connection, by two file descriptors that stay the caller's."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self._writing = reading, writing
        self._left = b""

    def send(self, message: Message) -> None:
        """Write a message; wait until the other end has room. Raises OSError without one."""
        line = memoryview(_MARK + base64.b64encode(pickle.dumps(message)) + b"\n")
        while line:
            line = line[os.write(self._writing, line) :]

    def receive(self, seconds: float | None = 0.0) -> Sequence[Message]:
        """Return the messages that have arrived, after at most `seconds`; None: without end.

        Raises EOFError if the other end is gone and has left nothing.
        """
        lines: list[bytes] = []
        while not lines and wait([self.reading], seconds):
            try:
                content = os.read(self.reading, _CHUNK_BYTES)
            except ConnectionError:
                content = b""
            if not content:
                raise EOFError
            *lines, self._left = (self._left + content).split(b"\n")
        marked = [line for line in lines if line.startswith(_MARK)]
        # From the user's own process: see the top of this file.
        return [pickle.loads(base64.b64decode(line[len(_MARK) :])) for line in marked]  # noqa: S301

"""A host: the process that launches trials, on this machine or on another one.

    starting    it was asked for, and waits for its machine
    running     it answers
    lost        it died, or its machine did; the next trial starts another one

`host_process.LocalHost` is on this machine. `places.remote_host.RemoteHost` is where a command of
Slurm, or a program of ours for Ray, starts it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from rankzero.launch import agent
from rankzero.tuning.trials.describe import ExperimentDescription


class Host(Protocol):
    """Launches one trial at a time, for one process without threads: the search."""

    @property
    def is_starting(self) -> bool:
        """Whether it still waits for its machine."""

    @property
    def was_lost(self) -> bool:
        """Whether it died during the trial that has ended."""

    @property
    def handles(self) -> Sequence[Connection | int]:
        """The objects that `multiprocessing.connection.wait` waits on for news of the trial."""

    def describe(
        self,
        reference: str,
        settings: Mapping[str, str],
        processes: int | None,
        parallel: int = 1,
        more: Sequence[int] = (),
    ) -> ExperimentDescription:
        """Return the description of the experiment in a file. Raises UserError, RunFailed."""

    def run(
        self,
        entry: Callable[[Any], str],
        topology: agent.Topology,
        request: Any,
        logs: Path,
        folder: Path,
    ) -> None:
        """Have every rank run `entry(request)`; return at once. See `has_ended`.

        `entry`: a function at the top of a module that imports no PyTorch. `folder`: all that the
        ranks read and write; `logs` is in it.
        """

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Return whether the trial has ended, after at most `seconds`. True once for each trial."""

    def signal(self, number: signal.Signals, written: Sequence[Path] = ()) -> None:
        """Send a signal to the trial that runs.

        `written`: files in its folder, or folders there, from which its ranks learn why.
        """

    def close(self) -> None:
        """End the host, and the trial that it runs."""


@contextlib.contextmanager
def closed_together() -> Iterator[list[Host]]:
    """Yield a list for hosts, and close all of them at the same time: each may take 15 seconds."""
    hosts: list[Host] = []
    try:
        yield hosts
    finally:
        with ThreadPoolExecutor(len(hosts) or 1) as pool:
            closed = [pool.submit(one.close) for one in hosts]
        for one in closed:
            one.result()

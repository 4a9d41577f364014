"""A host: the process that launches trials, on this machine or on another one.

    starting    it was asked for, and waits for its machine
    running     it answers
    lost        it died, or its machine did; the next trial starts another one

`host_process.LocalHost` is on this machine. `places.remote_host.RemoteHost` is where a command of
Slurm, or a program of ours for Ray, starts it. Each launches one trial at a time, for one process
without threads: the search.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from rankzero.tuning.places.remote_host import RemoteHost
from rankzero.tuning.trials.host_process import LocalHost

Host = LocalHost | RemoteHost


@contextlib.contextmanager
def closed_together() -> Iterator[list[Host]]:
    """Yield a list for hosts, and close all of them at the same time: each may take 15 seconds."""
    hosts: list[Host] = []
    try:
        yield hosts
    finally:
        with ThreadPoolExecutor(len(hosts) or 1) as pool:
            closed = pool.map(lambda one: one.close(), hosts)
        list(closed)  # raises the first error

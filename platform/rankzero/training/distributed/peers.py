"""Looks for another rank's failure, and makes its reason this rank's own.

gloo raises an error in a rank whose peer is gone. Under NCCL the rank waits for its GPU, until NCCL
or the launcher kills it without a reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rankzero.launch import failures
from rankzero.launch.failures import Failure
from rankzero.training.distributed.world import LOOK_SECONDS, World

# How long a rank may take to see a peer's end by itself, and to end.
_GRACE_SECONDS = 2.0


@contextlib.contextmanager
def watching(
    world: World,
    folder: Path,
    may_end: Callable[[], bool],
    *,
    look_seconds: float = LOOK_SECONDS,
    grace_seconds: float = _GRACE_SECONDS,
) -> Iterator[None]:
    """Look for another rank's failure while the block runs, in a thread of its own.

    This rank writes it into `folder`. On a GPU, if the block still runs `grace_seconds`
    later, this process ends as soon as `may_end` allows it.
    """
    over, look, rank = threading.Event(), world.failure_reader(), world.ranks.rank

    def watch(look: Callable[[], Failure | None]) -> None:
        found: Failure | None = None
        while found is None:
            if over.wait(look_seconds):
                return
            # The machine that has the store may be gone.
            with contextlib.suppress(Exception):
                found = look()
        if found.rank == rank:
            return
        failures.write(dataclasses.replace(found, time=time.time()), folder, rank)
        # gloo lets a rank end by itself, with its metrics.
        while world.device.type == "cuda" and not over.wait(grace_seconds):
            if may_end():
                # The main thread waits in C code, which no exception reaches.
                os._exit(1)

    if look is not None:
        # Not the watchdog's: it hangs while the machine that has the store does not answer.
        threading.Thread(target=watch, args=(look,), name="peers", daemon=True).start()
    try:
        yield
    finally:
        over.set()

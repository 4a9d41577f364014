"""The process above one trial's ranks: torchrun's agent, as `train` runs it. Forked from the server that has PyTorch.

The search itself imports no PyTorch; whatever becomes of a trial, to the search it is a process that ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

from rankzero.train.launch import Nodes, WorkersFailed
from rankzero.train.request import Request

ORPHAN_SECONDS = 20.0  # what the ranks get to stop by themselves once the search is gone


def main(nodes: Nodes, request: Request, logs: str) -> None:
    """Run one trial to its end; exit with 0 where the workers returned, 1 where one failed."""
    from rankzero.train import launch, worker

    _output_to(Path(logs) / "launcher.log")
    threading.Thread(target=_follow_the_search, daemon=True).start()
    try:
        launch.run(nodes, worker.main, request, Path(logs))
    except WorkersFailed as error:
        print(error, flush=True)
        sys.exit(1)


def _output_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)


def _follow_the_search() -> None:
    """Stop the trial when the search dies: nobody would read it, and it holds the GPUs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    for number in (signal.SIGTERM, signal.SIGQUIT):
        with contextlib.suppress(ProcessLookupError):
            os.kill(os.getpid(), number)
        time.sleep(ORPHAN_SECONDS)

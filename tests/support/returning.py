"""Entry points of workers, in a module that a forked worker can import."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import time
import weakref
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil
import torch

from rankzero import ranks
from rankzero.launch.agent import enter
from rankzero.training.checkpoints import best_model
from rankzero.training.distributed.world import join
from support import second_user

DEAF = "deaf"


def returned(event: Event, ready: Event) -> None:
    """Do what a worker of torchrun's agent does once its function has returned."""
    enter(lambda request: "FINISHED", None)
    ready.set()
    event.wait()


def fail_without_words(folder: str) -> str:
    """Fail as on a full disk, with an empty error file. Other ranks write their pid and wait."""
    if os.environ["LOCAL_RANK"] == "0":
        while not (Path(folder) / "1").exists():
            time.sleep(0.05)
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text("")
        os._exit(1)
    (Path(folder) / "pid").write_text(str(os.getpid()))
    (Path(folder) / "pid").rename(Path(folder) / "1")
    time.sleep(120)
    return "waited"


def print_on_a_full_disk(_request: object) -> str:
    """Print lines, of which the second does not fit: files may not grow then."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for stream in (sys.stdout, sys.stderr):
        print("before ü", file=stream, flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, most))
        print("lost", file=stream, flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        print("after", end="", file=stream)
    return "printed"


def die_after_a_print(_request: object) -> str:
    """Print to both streams, and end as by a signal."""
    for stream in (sys.stdout, sys.stderr):
        print("last words", file=stream)
    os._exit(9)


def fail_once(folder: str) -> str:
    """Write this process's id; local rank 0 fails at the first start."""
    pids = Path(folder) / "pids"
    pids.mkdir(exist_ok=True)
    (pids / str(os.getpid())).touch()
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    deadline = time.monotonic() + 60
    while len(list(pids.iterdir())) < (2 if first_start else 4) and time.monotonic() < deadline:
        time.sleep(0.02)
    if first_start and os.environ["LOCAL_RANK"] == "0":
        os._exit(1)
    while first_start:
        time.sleep(1)
    return "FINISHED"


def killed(_request: object) -> str:
    """Kill rank 1. The others wait."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)
    return "waited"


def meet(folder: str) -> str:
    """Join the other ranks; write where the launcher and its processes listen.

    ``listening.json`` has [address, port, number of keys if it is a TCPStore] of each socket.
    """
    with join(ranks.detect(), lambda _: torch.device("cpu")) as world:
        world.sum(torch.ones(1))
        if world.ranks.first:
            launcher = psutil.Process(os.getppid()).parent()
            assert launcher is not None
            found = [
                (*each, second_user.store_keys(*each)) for each in second_user.listening(launcher)
            ]
            (Path(folder) / "listening.json").write_text(json.dumps(found))
        world.sum(torch.ones(1))
    return "met"


def out_of_memory(folder: str, problems: Any, delivered: Any) -> None:
    """End as if the kernel had no memory left."""
    os.kill(os.getpid(), signal.SIGKILL)


def not_now(folder: str, problems: Any, delivered: Any) -> None:
    """End as if MLflow did not take the model for now."""
    problems.put("503 Service Unavailable")
    sys.exit(1)


def no_space(folder: str, problems: Any, delivered: Any) -> None:
    """Log the best model on a disk that is full."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    best_model._trace_and_log = fail
    best_model._run_child(folder, problems, delivered)


def stopped_in_a_callback(folder: str, problems: Any, delivered: Any) -> None:
    """Get SIGTERM in a weak reference's callback, from which Python lets no exception out."""

    def trace(*_: object) -> None:
        gone = set[int]()
        _reference = weakref.ref(gone, lambda _: signal.raise_signal(signal.SIGTERM))
        del gone
        time.sleep(1000)

    best_model._trace_and_log = trace
    best_model._run_child(folder, problems, delivered)


def told(folder: str, problems: Any, delivered: Any) -> None:
    """Write into ``seen`` that it has begun, and whether the run is delivered."""
    seen = Path(folder) / "seen"
    seen.write_text("begun")
    try:
        delivered.recv()
        seen.write_text("delivered")
    except EOFError:
        seen.write_text("alone")


def deaf(folder: str, problems: Any, delivered: Any) -> None:
    """Ignore SIGTERM, create a file that says so, and take long."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / DEAF).touch()
    time.sleep(1000)

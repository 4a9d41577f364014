"""Workers that have returned, or fail, for a process that can import no test."""

from __future__ import annotations

import json
import os
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil
import torch

from rankzero import ranks
from rankzero.launch.agent import enter
from rankzero.training.distributed.world import join

DEAF = "deaf"


def returned(event: Event, told: Event) -> None:
    """Do what torchrun's agent has a worker do once it has returned."""
    enter(lambda request: "FINISHED", None)
    told.set()
    event.wait()


def fail_without_words(folder: str) -> str:
    """Fail as on a full disk, with an empty file for the last words; other ranks wait, and say who they are."""
    if os.environ["LOCAL_RANK"] == "0":
        while not (Path(folder) / "1").exists():
            time.sleep(0.05)
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text("")
        os._exit(1)
    (Path(folder) / "pid").write_text(str(os.getpid()))
    (Path(folder) / "pid").rename(Path(folder) / "1")
    time.sleep(120)
    return "waited"


def meet(folder: str) -> str:
    """Meet the other ranks; write down on which addresses those who started us, and they, listen."""
    with join(ranks.detect(), torch.device("cpu")) as world:
        world.sum(torch.ones(1))
        if world.ranks.first:
            (Path(folder) / "listening.json").write_text(json.dumps(_listening()))
        world.sum(torch.ones(1))
    return "met"


def _listening() -> list[str]:
    launcher = psutil.Process(os.getppid()).parent()
    assert launcher is not None
    processes = [launcher, *launcher.children(recursive=True)]
    found = [one for process in processes for one in process.net_connections("tcp")]
    return sorted({one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN})


def deaf(folder: str, problems: Any) -> None:
    """Hear no SIGTERM, leave word of it, and take long."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / DEAF).touch()
    time.sleep(1000)

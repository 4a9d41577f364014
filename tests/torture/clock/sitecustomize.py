"""What Python imports first where this folder is on its path: the clocks of a command's own processes jump.

$TORTURE_JUMPS is ``recorder:2.5:3600 launcher:1:-60``: two and a half seconds after its start, the recorder's clock is
an hour ahead. Whoever has seen that leaves a file in $TORTURE_JUMPED. Ranks are forks: their experiment turns theirs.
"""

import os
import sys
import time
from pathlib import Path

REAL, BEGAN = time.time, time.monotonic()
WORDS = {
    "recorder": "rankzero.tracking.recorder",
    "courier": "rankzero.tracking.courier",
    "launcher": "rankzero",
}


def mine() -> list[tuple[str, float, float]]:
    """Return the jumps that are this process's: its name, after how many seconds, by how many."""
    told = [jump.split(":") for jump in os.environ.get("TORTURE_JUMPS", "").split()]
    return [
        (who, float(after), float(by)) for who, after, by in told if WORDS[who] in sys.orig_argv
    ]


def jumped() -> float:
    """Return the time, as a clock tells it that jumps."""
    now, age = REAL(), time.monotonic() - BEGAN
    for number, (who, after, by) in enumerate(JUMPS):
        if age > after:
            now += by
            Path(os.environ["TORTURE_JUMPED"], f"{who}-{os.getpid()}-{number}").touch()
    return now


JUMPS = mine()
if JUMPS:
    time.time = jumped

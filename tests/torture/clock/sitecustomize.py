"""Make the clocks of a command's processes jump.

Python imports this module first if its folder is on the path. $TORTURE_JUMPS may be
``recorder:2.5:3600 launcher:1:-60``: the recorder's clock is an hour ahead from 2.5 seconds after
its start. A process whose clock has jumped creates a file in $TORTURE_JUMPED. Ranks are forks and
do not import this. Their experiment changes their clocks.
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
    """Return this process's jumps: its name, the seconds until the jump, and its length."""
    jumps = [jump.split(":") for jump in os.environ.get("TORTURE_JUMPS", "").split()]
    return [
        (who, float(after), float(by)) for who, after, by in jumps if WORDS[who] in sys.orig_argv
    ]


def jumped() -> float:
    """Return the time of a clock that jumps."""
    now, age = REAL(), time.monotonic() - BEGAN
    for number, (who, after, by) in enumerate(JUMPS):
        if age > after:
            now += by
            Path(os.environ["TORTURE_JUMPED"], f"{who}-{os.getpid()}-{number}").touch()
    return now


JUMPS = mine()
if JUMPS:
    time.time = jumped

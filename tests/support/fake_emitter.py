"""Write many steps, for the tests of memory: python fake_emitter.py RUNS NAME URI STEPS STEPS …

Writes so many steps for each line that it reads, and answers each with a line.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from rankzero.events import RunStarted, StepsLogged
from rankzero.ranks import Ranks
from rankzero.run_store.folder import Identity
from rankzero.tracking.run_log import RunLog

WINDOW = 100  # steps that are logged at once, as the loop does once a second
METRICS = ("train/loss", "train/accuracy", "train/lr", "throughput/samples_per_second")


def main(runs: Path, name: str, uri: str, *parts: int) -> None:
    log = RunLog.open(runs, Identity(name, uuid.uuid4().hex, "tests", uri), Ranks(), [])
    log(RunStarted(time.time(), {"lr": "0.1"}, {}, log.attempt, 0, sum(parts)))
    first = 1
    for count in parts:
        for event in windows(first, count):
            log(event)
        log.flush()
        first += count
        print("written", flush=True)
        sys.stdin.readline()


def windows(first: int, count: int) -> Iterator[StepsLogged]:
    """Yield `count` steps from `first` on, a hundred a second, with values of full length."""
    began = time.time()
    for start in range(first, first + count, WINDOW):
        steps = list(range(start, min(start + WINDOW, first + count)))
        yield StepsLogged(
            steps,
            [began + step / WINDOW for step in steps],
            {key: [random.random() for _ in steps] for key in METRICS},
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))

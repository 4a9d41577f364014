"""A training process for tests: python fake_rank0.py FOLDER STEPS SECONDS_A_STEP END.

END is finish, die (SIGKILL), or massacre (SIGKILL for the recorder and its courier first).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil

from rankzero.events import RunEnded, RunStarted, StepsLogged
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import Journal
from rankzero.tracking import recorder


def main(folder: RunFolder, steps: int, seconds: float, end: str) -> None:
    recording = recorder.start(folder, [], 0)
    journal = Journal(folder.events)
    journal(RunStarted(time.time(), {"lr": "0.1"}, {}, 1, 0, steps))
    if end == "die" and os.fork() == 0:
        os.close(1)
        time.sleep(15)  # a data-loading process that outlives rank 0
        os._exit(0)
    slowest = 0.0
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        journal(StepsLogged([step], [time.time()], {"train/loss": [1.0 / step]}))
        journal.flush()
        slowest = max(slowest, time.perf_counter() - begin)
        time.sleep(seconds)
    print(slowest, flush=True)
    if end == "massacre":
        for child in psutil.Process().children(recursive=True):
            child.kill()
    if end != "finish":
        os.kill(os.getpid(), signal.SIGKILL)
    journal(RunEnded(time.time(), "FINISHED", "trained", None, {"best": 1.0}))
    journal.close()
    recording.close()


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])

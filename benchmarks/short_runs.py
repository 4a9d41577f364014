"""Measure what a short run costs apart from its training: processor time in all, and the end.

    python benchmarks/short_runs.py [--rounds 7]

Takes about three minutes. The processor time is that of a training of ten steps, of all processes
that it starts. The end is the time from the last event of the digits with two processes, with
checkpoints, best model and pictures, to the prompt. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import HERE, environment, rankzero, run, save

from rankzero.catalog import lookup
from rankzero.run_store.folder import RunFolder

ROOT = HERE.parent
_PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


def await_processes() -> None:
    """Wait for recorders and couriers, which became children of this process."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def processor_seconds(folder: Path) -> float:
    await_processes()
    before = os.times()
    name = f"run-{time.monotonic_ns()}"
    words = ("train", ROOT / "tests/fixtures/tiny.py", "train.steps=10", "--run-name", name)
    run(rankzero(*words), environment(RANKZERO_DIR=str(folder / "mlruns")), folder)
    await_processes()
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def end_seconds(folder: Path) -> float:
    name = f"run-{time.monotonic_ns()}"
    words = ("train", ROOT / "experiments/digits.py", "--nproc", 2, "--run-name", name)
    run(rankzero(*words), environment(RANKZERO_DIR=str(folder / "mlruns")), folder)
    ended = lookup.last_end(RunFolder(folder / "mlruns/runs" / name))
    assert ended is not None
    return time.time() - ended.time


def listing_seconds(folder: Path) -> float:
    began = time.time()
    run(rankzero("runs"), environment(RANKZERO_DIR=str(folder / "mlruns")), folder)
    return time.time() - began


MEASURED: dict[str, tuple[Callable[[Path], float], float]] = {
    "processor time of a training of ten steps": (processor_seconds, 5.0),
    "end of the training to the prompt": (end_seconds, 2.0),
    "rankzero runs": (listing_seconds, 0.3),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    found: dict[str, list[float]] = {label: [] for label in MEASURED}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        processor_seconds(folder)  # loads the files into memory and makes the database
        for _ in range(rounds):
            for label, (measure, _wanted) in MEASURED.items():
                found[label].append(measure(folder))
    for label, (_measure, wanted) in MEASURED.items():
        readings = found[label]
        spread = f"({min(readings):.2f} to {max(readings):.2f})"
        print(f"{label:42} {statistics.median(readings):5.2f} s  {spread}  wanted <= {wanted}")
    if rounds > 2:
        save("short_runs", seconds=found)


if __name__ == "__main__":
    main()

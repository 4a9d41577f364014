"""Measure from a trial's end to the next trial's first optimizer step, against a fresh torchrun.

    python benchmarks/turnaround.py [--rounds 7]

Takes about 3 minutes, with two processes. A round is one search of five trials with MLflow
tracking, which has four turn-arounds, and one bare script from the command to its first step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from harness import HERE, environment, line, rankzero, ratios, run, save
from startup import bare

from rankzero.catalog.lookup import folders
from rankzero.events import Event, RunEnded, StepsLogged
from rankzero.run_store.journal import read_all

WANTED = 0.35
TRIALS = 5


def turnarounds(folder: Path) -> list[float]:
    """Search. Return the seconds from each trial's end to the next trial's first step.

    Both times come from the trials' journals.
    """
    name = f"s-{time.monotonic_ns()}"
    run(
        rankzero(
            *("search", f"{HERE}/workloads.py:Mlp", "--nproc", 2, "--trials", TRIALS),
            *("--challengers", 0, "--no-probe", "--objective", "throughput"),
            *("--tolerance", 10, "--pruner", "none", "--study", name, "train.steps=100"),
        ),
        environment(RANKZERO_DIR=str(folder / "mlruns")),
        folder,
    )
    runs = [run for run in folders(folder / "mlruns/runs") if run.identity.parent == name]
    spans = sorted(span(list(read_all(run.events))) for run in runs)
    assert len(spans) == TRIALS, spans
    return [later[0] - earlier[1] for earlier, later in pairwise(spans)]


def span(events: list[Event]) -> tuple[float, float]:
    """Return the end time of a trial's first step, and that of the trial."""
    first = next(event for event in events if isinstance(event, StepsLogged)).times[0]
    return first, next(event for event in events if isinstance(event, RunEnded)).time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bare(folder)  # loads the files into memory
        readings = [(statistics.median(turnarounds(folder)), bare(folder)) for _ in range(rounds)]
    ours, theirs = zip(*readings, strict=True)
    ratio = ratios(ours, theirs)
    print(
        f"seconds, turn-around: {[round(s, 2) for s in ours]}\n"
        f"seconds, torchrun:    {[round(s, 2) for s in theirs]}"
    )
    print(line("a trial's end to the next's first step", ratio, f"<= {WANTED}"))
    if rounds > 2:
        save(
            "turnaround", seconds={"rankzero": ours, "torchrun": theirs}, ratio=ratio, wanted=WANTED
        )


if __name__ == "__main__":
    main()

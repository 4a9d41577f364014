"""Measure from the command to the end of the first optimizer step, against a bare script.

    python benchmarks/startup.py [--rounds 9]

Takes about 3 minutes. Both have two processes. The bare script runs under torchrun, which imports
PyTorch once in the agent and again in every worker.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from harness import HERE, environment, line, rankzero, ratios, run, save, torchrun

from rankzero.events import StepsLogged
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all

WANTED = 0.8


def bare(folder: Path) -> float:
    start = time.time()
    run(torchrun(HERE / "bare.py", "Mlp", 3, folder / "bare.json"), environment(), folder)
    times: list[float] = json.loads((folder / "bare.json").read_text())["times"]
    return times[0] - start


def tracked(folder: Path) -> float:
    label, start = f"run-{time.monotonic_ns()}", time.time()
    run(
        rankzero(
            *("train", f"{HERE}/workloads.py:Mlp", "--nproc", 2, "--run-name", label),
            *("train.steps=3", "train.mlflow.log_model=false"),
        ),
        environment(RANKZERO_DIR=str(folder / "mlruns")),
        folder,
    )
    events = read_all(RunFolder(folder / "mlruns/runs" / label).events)
    return next(event for event in events if isinstance(event, StepsLogged)).times[0] - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bare(folder), tracked(folder)  # loads the files into memory and makes the database
        readings = [(tracked(folder), bare(folder)) for _ in range(rounds)]
    ours, theirs = zip(*readings, strict=True)
    ratio = ratios(ours, theirs)
    print(
        f"seconds, tracked: {[round(s, 2) for s in ours]}\n"
        f"seconds, bare:    {[round(s, 2) for s in theirs]}"
    )
    print(line("command to first step", ratio, f"<= {WANTED}"))
    if rounds > 2:
        save("startup", seconds={"rankzero": ours, "bare": theirs}, ratio=ratio, wanted=WANTED)


if __name__ == "__main__":
    main()

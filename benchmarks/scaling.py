"""Compare samples/s of two processes with one, and with a bare PyTorch loop.

    python benchmarks/scaling.py [--rounds 5]

Takes about 5 minutes. The global batch is the same, and each process has one thread.

A round has RankZero with one process and with two, then a bare loop with one and with two. Every
second round has the reverse order. The first round is a warm-up. The rates leave out the first
fifth of the steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from harness import HERE, environment, line, rankzero, ratios, run, save, step_times

from rankzero.run_store.folder import RunFolder

WANTED, STEPS, WORKLOAD = 1.8, 120, "Wide"


def bare(processes: int, folder: Path) -> float:
    """Return a hand-written loop's steps per second."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(processes)),
    ]
    run(
        [*command, str(HERE / "bare.py"), WORKLOAD, str(STEPS), str(folder / "bare.json")],
        environment(),
        folder,
    )
    return rate(json.loads((folder / "bare.json").read_text())["times"])


def ours(processes: int, folder: Path) -> float:
    """Return a tracked run's steps per second."""
    name = f"run-{time.monotonic_ns()}"
    run(
        rankzero(
            *("train", f"{HERE}/workloads.py:{WORKLOAD}", "--nproc", processes),
            *("--run-name", name, f"train.steps={STEPS}", f"train.eval_every={STEPS}"),
            "train.mlflow.log_model=false",
        ),
        environment(RANKZERO_DIR=str(folder / "mlruns")),
        folder,
    )
    return rate(step_times(RunFolder(folder / "mlruns/runs" / name).events))


def rate(times: list[float]) -> float:
    """Return steps per second without the first fifth."""
    steady = times[len(times) // 5 :]
    return (len(steady) - 1) / (steady[-1] - steady[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        turns, readings = [(ours, 1), (ours, 2), (bare, 1), (bare, 2)], []
        for number in range(rounds + 1):
            # The symmetry cancels a drift of the machine's speed.
            order = turns[:: -1 if number % 2 else 1]
            rates = {turn: turn[0](turn[1], folder) for turn in order}
            readings.append([rates[turn] for turn in turns])
    one, two, bare_one, bare_two = zip(*readings[1:], strict=True)
    found = {
        "rankzero": ratios(two, one),
        "bare": ratios(bare_two, bare_one),
        "two over bare two": ratios(two, bare_two),
    }
    for name, ratio in found.items():
        is_of_candidates = "over" in name
        label = name if is_of_candidates else f"2 processes over 1, {name}"
        print(line(label, ratio, "near 1" if is_of_candidates else f">= {WANTED}"))
    if rounds > 2:
        save(
            "scaling",
            workload=WORKLOAD,
            steps=STEPS,
            wanted=WANTED,
            ratio=found,
            steps_per_second={"rankzero": [one, two], "bare": [bare_one, bare_two]},
        )


if __name__ == "__main__":
    main()

"""Measure how long `rankzero runs` takes with 5,000 runs on disk, from the shell.

    python benchmarks/many_runs.py [--runs 5000] [--rounds 10]

Takes about 30 seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import is_whole, save

from rankzero import config
from rankzero.catalog import summary_cache
from rankzero.events import CheckpointSaved, Evaluated, Event, RunEnded, RunStarted, StepsLogged
from rankzero.experiment import Experiment
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.uris import prepare_store
from rankzero.run_store.folder import Identity
from rankzero.run_store.journal import Journal

WANTED = 1.0
WINDOWS, STEPS = 12, 10
SPEEDS = ("samples_per_second", "step_seconds", "data_wait_fraction")
COMMANDS = {
    "runs": [],
    "runs 'lr<=0.01' --sort -samples/s": ["lr<=0.01", "--sort", "-samples/s"],
    "runs --json": ["--json"],
}


def events(number: int) -> list[Event]:
    """Return the events of a short run: a journal of about 11 kB."""
    began = 1_800_000_000.0 + 60 * number
    params = {
        **config.rendered(Experiment()),
        "lr": f"{number / 1e5:g}",
        "world_size": "1",
        "device": "cpu",
    }
    found: list[Event] = [
        RunStarted(began, params, {"rankzero.host": "here"}, 1, 0, WINDOWS * STEPS)
    ]
    for window in range(WINDOWS):
        steps = list(range(window * STEPS + 1, (window + 1) * STEPS + 1))
        times, last = [began + step / 10 for step in steps], steps[-1]
        losses = {name: [1.0 / step for step in steps] for name in ("train/loss", "train/accuracy")}
        speed = {
            f"throughput/{name}": [1234.5]
            for name in ("samples_per_second", "step_seconds", "data_wait_fraction")
        }
        found += [
            StepsLogged(steps, times, losses),
            StepsLogged([last], times[-1:], {"lr": [0.1], **speed}),
        ]
        found.append(
            Evaluated(
                times[-1], last, {"val/loss": 1.0 / last, "val/accuracy": 1 - 1.0 / last}, True
            )
        )
    found.append(
        CheckpointSaved(
            began + 13, last, f"checkpoints/step_{last:08d}", True, {"val/loss": 1.0 / last}
        )
    )
    summary = {"best": 1.0 / last, "samples_per_second": float(number), "train_seconds": 12.0}
    return [*found, RunEnded(began + 14, "FINISHED", "trained", None, summary)]


def make(runs: Path, count: int) -> None:
    """Make the folders of runs, and the embedded store, which knows their names."""
    runs.mkdir()
    uri = f"sqlite:///{runs.parent}/mlflow.db"
    prepare_store(uri)
    MlflowRuns(uri)  # makes the tables
    with contextlib.closing(sqlite3.connect(runs.parent / "mlflow.db")) as store, store:
        store.executemany(
            "INSERT INTO runs (run_uuid, name, lifecycle_stage) VALUES (?, ?, 'active')",
            ((f"{number:032x}", f"bench-{number:05d}") for number in range(count)),
        )
    for number in range(count):
        identity = Identity(
            f"bench-{number:05d}", f"{number:032x}", "bench", uri, mlflow_run_id=f"{number:032x}"
        )
        path = runs / identity.name
        path.mkdir()
        (path / "run.json").write_text(json.dumps(dataclasses.asdict(identity)))
        journal = Journal(path / "events.jsonl")
        for event in events(number):
            journal(event)
        journal.close()


def seconds(root: Path, words: list[str]) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "rankzero", "runs", *words, "--dir", str(root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make(root / "runs", options.runs)
        readings: dict[str, list[float]] = {"runs, the first time": []}
        for _ in range(options.rounds):
            (root / "runs" / summary_cache.HEADS).unlink(missing_ok=True)
            readings["runs, the first time"].append(seconds(root, []))
            for name, words in COMMANDS.items():
                readings.setdefault(name, []).append(seconds(root, words))
    medians = {name: statistics.median(values) for name, values in readings.items()}
    for name, value in medians.items():
        print(f"{name:36} {value:.2f} s   wanted <= {WANTED} s")
    if is_whole(parser, options, "runs"):
        save(
            "many_runs" if options.runs == 5000 else f"many_runs_{options.runs}",
            runs=options.runs,
            seconds=readings,
            medians=medians,
            wanted=WANTED,
        )


if __name__ == "__main__":
    main()

"""Measure how costs grow: with metrics a step, steps, ranks, runs, and checkpoints kept.

    python benchmarks/growth.py [--only NAME...] [--sizes N...] [--quick]

Takes about 25 minutes. Every cost is of real commands: `rankzero train`, `sync`, `report`, `runs`.
A cost's exponent is the slope of its logarithm between the two largest sizes: 1 is linear, and 0
does not grow. Processor time is a command's and its processes', so other work hardly changes it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import many_runs
import psutil
from commands import turn, watching
from harness import HERE, RESULTS, environment, machine, rankzero, run, save, step_times, torchrun

from rankzero.events import Event, RunEnded, RunStarted, StepsLogged
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import Journal

Costs = dict[str, float]
WANTED = 1.1
MOST_BARE_RANKS = 16
"""Under torchrun, each rank imports PyTorch by itself."""
# As the trainer reports a fast loop: a line for each half second.
WINDOW = 500


class Use(NamedTuple):
    """What a command used, with its processes that it waited for."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    """The most that one process held in memory."""


# Linux counts the starting process's memory as the command's, so a small process starts it.
STARTER = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, used = os.wait4(pid, 0)
with open("use", "w") as file:
    print(used.ru_utime + used.ru_stime, used.ru_maxrss << 10, file=file)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def use_of(words: Sequence[object], root: Path) -> Use:
    """Run a command of RankZero. Raises RuntimeError with its output if it fails."""
    begun = time.perf_counter()
    starter = [sys.executable, "-S", "-c", STARTER]
    run([*starter, *rankzero(*words)], environment(RANKZERO_DIR=str(root)), root.parent)
    seconds = time.perf_counter() - begun
    cpu_seconds, peak_bytes = map(float, (root.parent / "use").read_text().split())
    return Use(seconds, cpu_seconds, int(peak_bytes))


def train(root: Path, name: str, *words: object, nproc: int = 1) -> Use:
    """Train a workload of this folder, into journals only."""
    how = ["train", "--offline", "--run-name", name, "--nproc", nproc]
    return use_of([*how, *words, "train.mlflow.log_model=false", "train.test=false"], root)


def of_metrics(count: int, root: Path) -> Costs:
    """Return what a step costs that reports `count` metrics, and its points in MLflow."""
    # Points take longer in a large database, so each size has about as many.
    steps, name = max(400, 100_000 // count), f"metrics-{count}"
    folder = RunFolder(root / "runs" / name)

    def pid() -> int:
        return int(json.loads((folder.path / "recorder.json").read_text())["pid"])

    words = f"{HERE}/workloads.py:ManyMetrics", f"count={count}"
    with watching(pid) as uses:
        train(root, name, *words, f"train.steps={steps}", f"train.eval_every={steps}")
    train(root, f"{name}-short", *words, "train.steps=20", "train.eval_every=20")
    cost = turn(step_times(folder.events), uses).cpu_microseconds
    # Most of a short sync is the import of MLflow.
    short, long = use_of(["sync", f"{name}-short"], root), use_of(["sync", name], root)
    return {
        "rank 0's processor time a step, µs": cost,
        "journal a step, bytes": folder.events.stat().st_size / steps,
        "sync, processor time a step, µs": (long.cpu_seconds - short.cpu_seconds)
        / (steps - 20)
        * 1e6,
        "sync, most memory, MB": long.peak_bytes / 1e6,
    }


def of_steps(count: int, root: Path) -> Costs:
    """Return what a journal of `count` steps costs to deliver, to show, and to open in MLflow."""
    name, store = f"steps-{count}", root / "mlflow.db"
    uri = f"sqlite:///{store}"
    folder = RunFolder.open_or_create(root / "runs", Identity(name, name, "growth", uri))
    journal, begun = Journal(folder.events), time.process_time()
    for event in _long_run(count):
        journal(event)
    journal.close()
    written = time.process_time() - begun
    before = store.stat().st_size if store.exists() else 0
    synced = use_of(["sync", name], root)
    shown = use_of(["report", name], root)
    listed = use_of(["runs"], root)
    return {
        "making the journal, s": written,
        "journal, MB": folder.events.stat().st_size / 1e6,
        "sync, processor time, s": synced.cpu_seconds,
        "sync, most memory, MB": synced.peak_bytes / 1e6,
        "database, MB": (store.stat().st_size - before) / 1e6,
        "report, s": shown.seconds,
        "report, most memory, MB": shown.peak_bytes / 1e6,
        "runs for the first time, s": listed.seconds,
        "MLflow's answer for the curve, s": _curve_seconds(uri, name),
    }


def _long_run(steps: int) -> Iterator[Event]:
    """Return the events of a run that logs a loss at each step."""
    begun = 1_800_000_000.0

    def event(number: int) -> Event:
        if number < 0:
            return RunStarted(begun, {"lr": "0.1"}, {"rankzero.host": "here"}, 1, 0, steps)
        first = number * WINDOW + 1
        if first > steps:
            return RunEnded(begun + steps / 1000, "FINISHED", "trained", None, {"best": 0.5})
        window = list(range(first, min(first + WINDOW, steps + 1)))
        times = [begun + step / 1000 for step in window]
        return StepsLogged(window, times, {"train/loss": [1 / step for step in window]})

    return map(event, range(-1, math.ceil(steps / WINDOW) + 1))


def _curve_seconds(uri: str, name: str) -> float:
    """Return how long MLflow's server takes for the points that its page draws of a curve."""
    script = """
import sys, time
from flask import Flask
from mlflow.server import app
from mlflow.server.handlers import initialize_backend_stores
uri, run_id = sys.argv[1:]
initialize_backend_stores(uri, uri + "-artifacts")
address = "/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval"
query = {"run_ids": run_id, "metric_key": "train/loss", "max_results": 320}
client = app.test_client()
for _ in range(2):
    begun = time.perf_counter()
    answer = client.get(address, query_string=query)
    assert answer.status_code == 200 and len(answer.json["metrics"]) > 100, answer.text[:500]
    seconds = time.perf_counter() - begun
print(seconds)
"""
    run_id = MlflowRuns(uri).find_run(name).run_id
    words = [sys.executable, "-c", script, uri, run_id]
    environ = {**os.environ, "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE": "true"}
    done = subprocess.run(words, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return float(done.stdout.split()[-1])


def of_ranks(count: int, root: Path) -> Costs:
    """Return what `count` ranks cost: to start, to step beside a bare loop, and in memory."""
    more, (few, many) = max(100, 4000 // count), (Watch(), Watch())
    begun = time.perf_counter()
    for watch, steps in ((few, 20), (many, 20 + more)):
        words = f"{HERE}/workloads.py:Mlp", f"train.steps={steps}", f"train.eval_every={steps}"
        with watch:
            train(root, f"ranks-{count}-{steps}", *words, nproc=count)
        if watch is few:
            seconds = time.perf_counter() - begun
    step = (many.cpu_seconds - few.cpu_seconds) / more
    found = {
        "command of 20 steps, s": seconds,
        "processor time without the steps, s": few.cpu_seconds - 20 * step,
        "processor time a step, ms": step * 1e3,
        "all processes' memory, MB": max(few.most_bytes, many.most_bytes) / 1e6,
    }
    if count <= MOST_BARE_RANKS:
        bare = Watch(), Watch()
        for watch, steps in zip(bare, (20, 20 + more), strict=True):
            script = torchrun(HERE / "bare.py", "Mlp", steps, root.parent / "bare.json")
            script[script.index("--nproc-per-node") + 1] = str(count)
            with watch:
                run(script, environment(), root.parent)
        used = bare[1].cpu_seconds - bare[0].cpu_seconds
        found["bare loop's processor time a step, ms"] = used / more * 1e3
    return found


class Watch:
    """Reads all processes below this one: their processor time, and their proportional memory."""

    def __init__(self) -> None:
        self._over, self.most_bytes = threading.Event(), 0
        self._seconds: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch)

    @property
    def cpu_seconds(self) -> float:
        """Return what they used, except for the last quarter of a second of each."""
        return sum(self._seconds.values())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.25):
            found = 0
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    cpu = process.cpu_times()
                    self._seconds[process.pid] = cpu.user + cpu.system
                    found += process.memory_full_info().pss
            self.most_bytes = max(self.most_bytes, found)


def of_runs(count: int, root: Path) -> Costs:
    """Return how long `rankzero runs` takes with `count` runs on the disk."""
    root = root / f"runs-{count}"
    root.mkdir(parents=True)
    many_runs.make(root / "runs", count)
    first = many_runs.seconds(root, [])
    again = min(many_runs.seconds(root, []) for _ in range(3))
    condition = min(many_runs.seconds(root, ["lr<=0.01"]) for _ in range(3))
    return {"runs for the first time, s": first, "runs, s": again, "runs 'lr<=0.01', s": condition}


def of_checkpoints(count: int, root: Path) -> Costs:
    """Return what a checkpoint costs while `count` are kept, and what `rankzero resume` does."""
    uses, seconds, name, more = list[Use](), list[float](), "", 300
    for steps in (count, count + more):
        name = f"checkpoints-{count}-{steps}"
        words = f"{HERE}/workloads.py:Mlp", f"train.steps={steps}", "train.eval_every=1"
        kept = "train.checkpoints.save_every=1", f"train.checkpoints.keep={count}"
        with Watch() as watch:
            uses.append(train(root, name, *words, *kept))
        seconds.append(watch.cpu_seconds)
    found = len(list((root / "runs" / name / "checkpoints").glob("step_*")))
    if not count <= found <= count + 1:  # the best, and the last
        raise RuntimeError(f"{found} checkpoints are there, {count} should be")
    resumed = use_of(["resume", name, "--offline", f"train.steps={count + more + 1}"], root)
    return {
        "processor time a step, evaluation and checkpoint, ms": (seconds[1] - seconds[0])
        / more
        * 1e3,
        "time a step, evaluation and checkpoint, ms": (uses[1].seconds - uses[0].seconds)
        / more
        * 1e3,
        "resume, s": resumed.seconds,
    }


AXES: dict[str, tuple[Callable[[int, Path], Costs], tuple[int, ...]]] = {
    "metrics": (of_metrics, (1, 10, 100, 1000)),
    "steps": (of_steps, (10_000, 100_000, 1_000_000, 10_000_000)),
    "ranks": (of_ranks, (2, 4, 8, 16, 32, 64)),
    "runs": (of_runs, (10, 100, 1000, 10_000, 50_000)),
    "checkpoints": (of_checkpoints, (1, 10, 100)),
}


def exponents(rows: dict[int, Costs]) -> Costs:
    """Return each cost's slope of the logarithm between the two largest sizes."""
    if len(rows) < 2:
        return {}
    (one, small), (other, large) = sorted(rows.items())[-2:]
    # A difference of two readings may be below its noise.
    known = [name for name in large if min(large[name], small.get(name, 0.0)) > 0]
    return {name: math.log(large[name] / small[name]) / math.log(other / one) for name in known}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--sizes", nargs="+", type=int, help="other sizes, not saved")
    parser.add_argument("--quick", action="store_true", help="the two smallest sizes, not saved")
    options = parser.parse_args()
    if options.sizes and len(options.only) > 1:
        parser.error("--sizes needs --only with one name")
    known = RESULTS / "growth.json"
    axes = json.loads(known.read_text())["axes"] if known.exists() else {}
    for axis in options.only:
        measure, sizes = AXES[axis]
        rows: dict[int, Costs] = {}
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary) / "mlruns"
            (root / "runs").mkdir(parents=True)
            for size in sizes[:2] if options.quick else options.sizes or sizes:
                rows[size] = measure(size, root)
                found = ", ".join(f"{name}: {value:.4g}" for name, value in rows[size].items())
                print(f"{axis} {size:,}: {found}", flush=True)
        slopes = exponents(rows)
        for name, slope in slopes.items():
            print(f"    {name}: exponent {slope:.2f}   wanted <= {WANTED}", flush=True)
        axes[axis] = {"machine": machine(), "exponents": slopes, "rows": rows}
        if not (options.quick or options.sizes):
            save("growth", wanted=WANTED, axes=axes)


if __name__ == "__main__":
    main()

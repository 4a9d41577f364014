"""Steps/s of a fully tracked run against a bare hand-written DDP loop that logs nothing.   about 10 minutes

    python benchmarks/tracking_overhead.py [--rounds 5] [--quick]

Two gloo processes, one thread each; same model, data, order, optimizer. The tracked run puts one `train/loss`
point per step into MLflow (checked after each run) and samples the machine. Interleaved: bare, sqlite, bare,
HTTP, … Timed: all steps but the first fifth, by rank 0's clock; evaluation and checkpoint come after the last step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from harness import HERE, environment, line, rankzero, ratios, run, save, torchrun

from rankzero.events import StepsLogged
from rankzero.tracking.catalog import mlflow_id
from rankzero.tracking.journal import RunFolder, read_all
from rankzero.tracking.mlflow import Tracker
from rankzero.tracking.store import server_command, server_environment

STEPS = {"Mlp": 7000, "Convnet": 400}
WANTED = {"Mlp": 0.95, "Convnet": 0.99}
PORT = 5917


def rate(times: list[float]) -> float:
    """Return steps per second, without the first fifth."""
    warm = len(times) // 5
    return (len(times) - 1 - warm) / (times[-1] - times[warm])


def bare(name: str, steps: int, folder: Path) -> tuple[float, float]:
    run(torchrun(HERE / "bare.py", name, steps, folder / "bare.json"), environment(), folder)
    found = json.loads((folder / "bare.json").read_text())
    return rate(found["times"]), found["loss"]


def tracked(name: str, steps: int, folder: Path, uri: str | None) -> tuple[float, float]:
    label = f"{name}-{time.monotonic_ns()}"
    run(rankzero("train", f"{HERE}/workloads.py:{name}", "--nproc", 2, "--run-name", label, f"train.steps={steps}",
                 f"train.eval_every={steps}", "train.log_model=false", *(["--tracking-uri", uri] if uri else [])),
        environment(RANKZERO_DIR=str(folder / "mlruns")), folder)  # fmt: skip
    journal = RunFolder(folder / "mlruns/runs" / label)
    events = [event for event in read_all(journal.events) if isinstance(event, StepsLogged)
              and "train/loss" in event.metrics]  # fmt: skip
    times = [moment for event in events for moment in event.times]
    run_id = mlflow_id(journal)
    assert run_id is not None
    points = Tracker(journal.identity.tracking_uri).history(run_id, "train/loss")
    assert [point.step for point in points] == list(range(1, steps + 1)), "MLflow does not have every step"
    return rate(times), events[-1].metrics["train/loss"][-1]


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """An MLflow server on this machine's same two cores."""
    (folder / "server").mkdir()
    with subprocess.Popen(server_command(folder / "server", PORT), env=server_environment(os.environ), cwd=folder,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:  # fmt: skip
        uri = f"http://127.0.0.1:{PORT}"
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=1):
                break
            time.sleep(0.1)
        try:
            yield uri
        finally:
            process.terminate()


def compare(name: str, steps: int, rounds: int, folder: Path, uri: str) -> dict[str, object]:
    """Return both stores' ratios and every reading of a workload."""
    readings: dict[str, list[float]] = {"bare_sqlite": [], "sqlite": [], "bare_http": [], "http": []}
    for number in range(rounds):
        for store, address in (("sqlite", None), ("http", uri)):
            plain, plain_loss = bare(name, steps, folder)
            speed, loss = tracked(name, steps, folder, address)
            assert abs(plain_loss - loss) < 1e-3, f"not the same work: {plain_loss} and {loss}"
            readings[f"bare_{store}"].append(plain)
            readings[store].append(speed)
            print(f"  {name} {store} round {number}: {plain:.1f} bare, {speed:.1f} tracked", flush=True)
    found = {store: ratios(readings[store], readings[f"bare_{store}"]) for store in ("sqlite", "http")}
    for store, ratio in found.items():
        print(line(f"{name}, {store}", ratio, f">= {WANTED[name]}"), flush=True)
    return {"steps": steps, "steps_per_second": readings, "ratio": found, "wanted": WANTED[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it works")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, server(Path(temporary)) as uri:
        found = {name: compare(name, steps // 10 if options.quick else steps, 1 if options.quick else options.rounds,
                               Path(temporary), uri) for name, steps in STEPS.items()}  # fmt: skip
    if not options.quick:
        save("tracking_overhead", workloads=found)


if __name__ == "__main__":
    main()

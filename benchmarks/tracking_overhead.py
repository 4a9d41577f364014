"""Steps/s of a fully tracked run against a bare hand-written DDP loop that logs nothing.   about 30 minutes

    python benchmarks/tracking_overhead.py [--rounds 5] [--quick]

Two gloo processes, one thread each; same model, data, order, optimizer. The tracked run puts one `train/loss`
point per step into MLflow (checked after each run) and samples the machine. Interleaved: bare, sqlite, bare,
HTTP, sqlite, bare, … (the order within a pair alternates, since a shared machine's speed drifts). Timed by
rank 0's clock; evaluation and checkpoint come after the last step. Two figures a run of about half a minute: `whole`
is all steps, with the import of MLflow on the same two cores in them; `steady` is all but the first fifth.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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

STEPS = {"Mlp": 15_000, "Convnet": 2400}
WANTED = {"Mlp": 0.95, "Convnet": 0.99}
PORT = 5917


@dataclasses.dataclass(frozen=True)
class Reading:
    """One run's steps per second, and its last loss."""

    whole: float
    steady: float
    loss: float


def rate(times: list[float], first: int) -> float:
    """Return steps per second from step `first` (0-based) on."""
    return (len(times) - 1 - first) / (times[-1] - times[first])


def reading(times: list[float], loss: float) -> Reading:
    return Reading(rate(times, 0), rate(times, len(times) // 5), loss)


def bare(name: str, steps: int, folder: Path) -> Reading:
    run(torchrun(HERE / "bare.py", name, steps, folder / "bare.json"), environment(), folder)
    found = json.loads((folder / "bare.json").read_text())
    return reading(found["times"], found["loss"])


def tracked(name: str, steps: int, folder: Path, uri: str | None) -> Reading:
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
    return reading(times, events[-1].metrics["train/loss"][-1])


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


def pair(name: str, steps: int, folder: Path, address: str | None, tracked_first: bool) -> dict[str, Reading]:
    """Run both contestants side by side in time; both must have done the same work."""
    contestants = {"bare": lambda: bare(name, steps, folder), "tracked": lambda: tracked(name, steps, folder, address)}
    found = {who: contestants[who]() for who in sorted(contestants, reverse=tracked_first)}
    losses = [reading.loss for reading in found.values()]
    assert abs(losses[0] - losses[1]) < 1e-3, f"not the same work: {losses}"
    return found


def compare(name: str, steps: int, rounds: int, folder: Path, uri: str) -> dict[str, object]:
    """Return both stores' ratios and every reading of a workload."""
    pairs: dict[str, list[dict[str, Reading]]] = {"sqlite": [], "http": []}
    for number in range(rounds):
        for store, address in (("sqlite", None), ("http", uri)):
            found = pair(name, steps, folder, address, tracked_first=bool(number % 2))
            pairs[store].append(found)
            print(f"  {name} {store} round {number}: {found}", flush=True)
    result = {f"{store}_{span}": ratios([getattr(found["tracked"], span) for found in pairs[store]],
                                        [getattr(found["bare"], span) for found in pairs[store]])
              for store in pairs for span in ("whole", "steady")}  # fmt: skip
    for label, ratio in result.items():
        print(line(f"{name}, {label}", ratio, f">= {WANTED[name]}"), flush=True)
    readings = {store: [{who: dataclasses.asdict(one) for who, one in found.items()} for found in pairs[store]]
                for store in pairs}  # fmt: skip
    return {"steps": steps, "readings": readings, "ratio": result, "wanted": WANTED[name]}


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

"""Measure delivery and training while sixteen other processes want the two cores.

    python benchmarks/busy_machine.py [--blocks 4] [--short 20] [--minutes 5] [--quick]

Takes about an hour and a half. The other processes are endless loops of Python, each in a session
of its own, because Linux may divide the processors among sessions.

- short: runs of a few seconds. The command of how many returns within its minute with everything
  in MLflow, and after how many seconds?
- lag: one run of several minutes. Each second: how old is the oldest step that MLflow does not
  have? MLflow's own database answers.
- steps: steps/s of a tracked run over a bare loop that logs nothing, in one pair of processes,
  interleaved: bare, tracked, tracked, bare. `steady` leaves out the first fifth of the steps,
  `whole` has the import of MLflow, too.
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import HERE, environment, interval, is_whole, known, line, rankzero, ratios, save
from tracking_overhead import mean_rates, side_by_side

from rankzero.events import StepsLogged
from rankzero.mlflow_store.uris import DATABASE, default_tracking_uri
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read
from rankzero.tracking import delivery_status

WORKLOAD, STEPS = "Convnet", 600  # two minutes
WANTED_SHORT, WANTED_LAG, WANTED_STEPS = 0.95, 30.0, 0.98


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep the machine busy for the duration of the block."""
    command = [sys.executable, "-c", "while 1: pass"]
    others = [subprocess.Popen(command, start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def train(folder: Path, name: str, *settings: str) -> subprocess.Popen[bytes]:
    """Start `rankzero train` of one process in `folder`."""
    command = rankzero("train", f"{HERE / 'workloads.py'}:Mlp", "--nproc", 1, "--run-name", name)
    return subprocess.Popen(
        [*command, "train.mlflow.log_model=false", *settings],
        env=environment(),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def short(folder: Path, count: int) -> list[dict[str, Any]]:
    """Return, for each of `count` short runs, its seconds and whether MLflow has everything."""
    found = []
    for number in range(count):
        began = time.monotonic()
        code = train(folder, f"short-{number}", "train.steps=200").wait()
        seconds = time.monotonic() - began
        run = RunFolder(folder / "mlruns" / "runs" / f"short-{number}")
        delivery = delivery_status.status(run)
        found.append(
            {
                "seconds": seconds,
                "code": code,
                "delivered": delivery.done,
                "lacks": delivery.lacks,
                "error": delivery.error,
            }
        )
        print(found[-1], flush=True)
    return found


def lags(folder: Path, minutes: float) -> list[float]:
    """Return the age of the oldest undelivered step, each second of one run, until it stops."""
    process = train(folder, "long", "train.steps=100000000", f"train.limits.max_minutes={minutes}")
    run, found = RunFolder(folder / "mlruns" / "runs" / "long"), list[float]()
    database = folder / "mlruns" / DATABASE
    times, offset = dict[int, float](), 0
    while process.poll() is None:
        time.sleep(1.0)
        events, offset = read(run.events, offset) if run.events.exists() else ([], 0)
        for event in events:
            if isinstance(event, StepsLogged):
                times |= dict(zip(event.steps, event.times, strict=True))
        highest = in_mlflow(database, "long")
        times = {step: at for step, at in times.items() if step > highest}
        if events:  # it trains
            found.append(max(0.0, time.time() - min(times.values())) if times else 0.0)
    return found


def in_mlflow(database: Path, name: str) -> int:
    """Return the highest step of `train/loss` that the embedded store has of the run, or -1."""
    query = (
        "SELECT max(step) FROM metrics JOIN runs USING (run_uuid) "
        "WHERE runs.name = ? AND key = 'train/loss'"
    )
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as store,
    ):
        highest = store.execute(query, (name,)).fetchone()[0]
        return -1 if highest is None else int(highest)
    return -1


def steps_per_second(folder: Path, steps: int, blocks: int) -> dict[str, Any]:
    """Return the ratios of a tracked run's steps/s to a bare loop's, and every reading."""
    uris = {"bare": None, "tracked": default_tracking_uri(folder)}
    turns = side_by_side(WORKLOAD, steps, blocks, uris, folder)
    found: dict[str, Any] = {"turns": turns}
    for span in ("whole", "steady"):
        rates = [mean_rates(turns, who, span) for who in ("tracked", "bare")]
        found[span] = ratios(*rates) | interval(*rates)
        print(line(f"{WORKLOAD}, {span}", found[span], f">= {WANTED_STEPS}"), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--short", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--others", type=int, default=16, help="processes that keep it busy")
    parser.add_argument("--only", choices=("short", "lag", "steps"))
    parser.add_argument("--quick", action="store_true", help="to check that it works")
    options = parser.parse_args()
    steps = STEPS
    if options.quick:
        options.blocks, options.short, options.minutes, steps = 1, 4, 1.5, 60
    # A part that is measured alone replaces only itself.
    found: dict[str, Any] = known("busy_machine") if options.only else {}
    found["others"] = options.others
    with tempfile.TemporaryDirectory() as temporary, busy(options.others):
        folder = Path(temporary)
        if options.only in (None, "short"):
            found["short"] = runs = short(folder, options.short)
            delivered = sum(run["delivered"] for run in runs)
            print(f"delivered: {delivered} of {len(runs)}   wanted >= {WANTED_SHORT:.0%}")
        if options.only in (None, "lag"):
            ages = lags(folder, options.minutes)
            found["lag"] = {"most": max(ages), "seconds": ages}
            print(f"behind: at most {max(ages):.1f} s   wanted <= {WANTED_LAG:.0f} s", flush=True)
        if options.only in (None, "steps"):
            found["steps"] = steps_per_second(folder, steps, options.blocks)
    if is_whole(parser, options, "only"):
        save("busy_machine", **found)


if __name__ == "__main__":
    main()

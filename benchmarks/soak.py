"""Train for an hour at full speed, and measure what grows.

    python benchmarks/soak.py [--minutes 60]

Two gloo processes train an MLP, fully tracked to a server on the same two cores. The server is
killed and restarted every five minutes. Every ten seconds the script reads the resident memory and
the open files of rank 0, the recorder and the courier. After the run, `rankzero sync` delivers the
journal once more, to an empty server. Both servers must then have each journaled point once, with
the same value.

The slope of the memory is a line through the means of ten equal parts of the time after the
warm-up, with Student's 95 % interval. The parts are long, so that their errors hardly depend on
each other. If a courier was restarted, its longest-lived process counts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from harness import HERE, environment, is_whole, rankzero, save

from rankzero.catalog.lookup import mlflow_id
from rankzero.confidence import student_t
from rankzero.errors import FINISHED
from rankzero.events import CheckpointSaved, Evaluated, RunEnded, StepsLogged
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.uris import DATABASE
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all

sys.path.insert(0, str(HERE.parent / "tests"))

from torture.ground import Broken
from torture.servers import Server

NAME = "soak"
SAMPLE_SECONDS, PARTS = 10.0, 10
# Every five minutes of an hour, and closer together in a shorter run.
RESTARTS, LEAST_SECONDS = 12, 60.0
# Steps from one checkpoint to the next: 240 in an hour at 400 steps a second.
SAVE_EVERY = 6000
# Until memory no longer grows for reasons that end: imports, caches, the first checkpoints.
WARM_UP = 0.2
ROLES = ("rank 0", "recorder", "courier")
DELIVERY_SECONDS = "1800"
MEGABYTE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Sample:
    """One process's use of the machine at one time."""

    seconds: float
    pid: int
    megabytes: float
    files: int


def means(samples: Sequence[Sample], field: str) -> list[float]:
    """Return the means of a field in equal parts of the time."""
    ends = [len(samples) * n // PARTS for n in range(PARTS + 1)]
    parts = [samples[begin:end] for begin, end in itertools.pairwise(ends)]
    return [statistics.fmean(getattr(one, field) for one in part) for part in parts if part]


def slope(samples: Sequence[Sample], field: str) -> dict[str, float]:
    """Return the change of a field in an hour, with the ends of its 95 % interval."""
    hours = [seconds / 3600 for seconds in means(samples, "seconds")]
    values = means(samples, field)
    if len(values) < PARTS:
        return {"an_hour": math.nan, "low": math.nan, "high": math.nan}
    line = statistics.linear_regression(hours, values)
    residuals = [
        value - line.intercept - line.slope * hour
        for hour, value in zip(hours, values, strict=True)
    ]
    spread = sum((hour - statistics.fmean(hours)) ** 2 for hour in hours)
    error = math.sqrt(sum(one**2 for one in residuals) / (PARTS - 2) / spread)
    half = student_t(PARTS - 2) * error
    return {"an_hour": line.slope, "low": line.slope - half, "high": line.slope + half}


class Watch:
    """Samples the processes of the run."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._began = folder, time.monotonic()
        self.samples: dict[str, list[Sample]] = {role: [] for role in ROLES}
        self.journal_bytes: list[tuple[float, int]] = []

    def look(self) -> None:
        """Read every process of the run once."""
        seconds = time.monotonic() - self._began
        for role, process in self._processes().items():
            with contextlib.suppress(psutil.Error):
                megabytes = process.memory_info().rss / MEGABYTE
                # A process that has ended keeps its id until its parent looks.
                if megabytes:
                    sample = Sample(seconds, process.pid, megabytes, process.num_fds())
                    self.samples[role].append(sample)
        with contextlib.suppress(OSError):
            self.journal_bytes.append((seconds, self._folder.events.stat().st_size))

    def figures(self) -> dict[str, Any]:
        """Return, by role, how memory and open files changed after the warm-up."""
        found: dict[str, Any] = {}
        for role, samples in self.samples.items():
            pids = [one.pid for one in samples]
            mine = [one for one in samples if one.pid == statistics.mode(pids)]
            later = mine[int(len(mine) * WARM_UP) :]
            found[role] = {
                "processes": len(set(pids)),
                "megabytes": {"first": later[0].megabytes, "last": later[-1].megabytes},
                "megabytes_by_tenths": means(later, "megabytes"),
                "megabytes_an_hour": slope(later, "megabytes"),
                "files": {"first": later[0].files, "last": later[-1].files},
                "most_files": max(one.files for one in later),
            }
        return found

    def _processes(self) -> dict[str, psutil.Process]:
        found: dict[str, psutil.Process] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
            claim = json.loads((self._folder.path / "recorder.json").read_text())
            found["rank 0"] = psutil.Process(int(claim["pid"]))
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if str(self._folder.path) in words:
                    role = "recorder" if "rankzero.tracking.recorder" in words else "courier"
                    found[role] = process
        return found


def train(folder: Path, server: Server, minutes: float) -> tuple[RunFolder, Watch, int]:
    """Train for so long, and restart the server meanwhile. Return the run and the restarts."""
    run_folder = RunFolder(folder / "mlruns" / "runs" / NAME)
    restart_seconds = max(60 * minutes / RESTARTS, LEAST_SECONDS)
    words = (
        *("train", f"{HERE}/workloads.py:Mlp", "--run-name", NAME, "--nproc", 2),
        *("--tracking-uri", server.uri, f"train.limits.max_minutes={minutes}"),
        *("train.steps=1000000000", "train.eval_every=10000", "train.checkpoints.keep=2"),
        f"train.checkpoints.save_every={SAVE_EVERY}",
    )
    with (folder / "output.txt").open("wb") as output:
        command = subprocess.Popen(
            rankzero(*words),
            cwd=folder,
            env=environment(RANKZERO_DELIVERY_GRACE_SECONDS=DELIVERY_SECONDS),
            stdout=output,
            stderr=output,
        )
    watch, restarts, restarted = Watch(run_folder), 0, time.monotonic()
    while command.poll() is None:
        time.sleep(min(SAMPLE_SECONDS, 60 * minutes / 100))
        watch.look()
        if time.monotonic() - restarted > restart_seconds:
            server.kill()
            # On a busy machine it may answer later. Until then, the server is away.
            with contextlib.suppress(Broken):
                server.start()
            restarts, restarted = restarts + 1, time.monotonic()
    # The limit on its minutes is a planned end.
    if command.returncode != FINISHED:
        printed = (folder / "output.txt").read_text()
        raise SystemExit(f"the run ended with {command.returncode}: {printed[-2000:]}")
    return run_folder, watch, restarts


def deliver(folder: Path) -> float:
    """Deliver the run's journal whole; return the seconds that took.

    On a busy machine the server may not answer in time, and `rankzero sync` says to try again.
    """
    began = time.monotonic()
    command = rankzero("sync", NAME)
    while subprocess.run(command, env=environment(), cwd=folder, check=False).returncode:
        if time.monotonic() - began > float(DELIVERY_SECONDS):
            raise SystemExit(f"the journal is not delivered after {DELIVERY_SECONDS} s")
        time.sleep(SAMPLE_SECONDS)
    return time.monotonic() - began


def copy_to(run_folder: RunFolder, target: Path, uri: str) -> RunFolder:
    """Copy the journals of a run, without what is known of their delivery, for another server."""
    copied = RunFolder(target / "mlruns" / "runs" / NAME)
    shutil.copytree(run_folder.path, copied.path, ignore=shutil.ignore_patterns("delivery*.json"))
    identity = dataclasses.replace(run_folder.identity, tracking_uri=uri, mlflow_run_id=None)
    copied.write_identity(identity)
    return copied


def differences(run_folder: RunFolder, database: Path) -> tuple[int, int]:
    """Return how many points the server lacks, doubles or has otherwise, and how many it has.

    It reads the server's database, because its API needs an hour for so many points.
    """
    run_id, wanted = mlflow_id(run_folder), journaled(run_folder)
    wrong = total = 0
    with contextlib.closing(sqlite3.connect(database)) as store:
        for name, values in wanted.items():
            rows = store.execute(
                "select step, value, is_nan from metrics where run_uuid = ? and key = ?",
                (run_id, name),
            ).fetchall()
            found = {step: math.nan if is_nan else value for step, value, is_nan in rows}
            total += len(rows)
            wrong += len(rows) - len(found)
            wrong += sum(not same(found.get(step), value) for step, value in values.items())
            wrong += len(set(found) - set(values))
    return wrong, total


def same(found: float | None, wanted: float) -> bool:
    return found is not None and (found == wanted or (math.isnan(found) and math.isnan(wanted)))


def journaled(run_folder: RunFolder) -> Mapping[str, Mapping[int, float]]:
    """Return the journal's values by metric and step."""
    found: dict[str, dict[int, float]] = {}
    for event in read_all(run_folder.events):
        if isinstance(event, StepsLogged):
            for name, values in event.metrics.items():
                found.setdefault(name, {}).update(zip(event.steps, values, strict=True))
        elif isinstance(event, Evaluated):
            for name, value in event.metrics.items():
                found.setdefault(name, {})[event.step] = value
    return found


def facts(run_folder: RunFolder) -> dict[str, Any]:
    """Return steps, checkpoints and the journal's size."""
    steps, checkpoints, status, times = 0, 0, "", []
    for event in read_all(run_folder.events):
        if isinstance(event, StepsLogged):
            steps = max(steps, event.steps[-1])
            times += [event.times[0], event.times[-1]]
        elif isinstance(event, CheckpointSaved):
            checkpoints += 1
        elif isinstance(event, RunEnded):
            status = event.status
    size = run_folder.events.stat().st_size
    return {
        "status": status,
        "steps": steps,
        "steps_a_second": steps / (times[-1] - times[0]),
        "checkpoints": checkpoints,
        "journal_bytes": size,
        "journal_bytes_a_step": size / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--report", type=Path, help="write the figures here, not into results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rankzero-soak-") as temporary:
        folder, empty = Path(temporary), Path(temporary) / "empty.db"
        MlflowRuns(f"sqlite:///{empty}")
        with contextlib.closing(sqlite3.connect(empty)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with Server(folder / "server", empty) as server:
            run_folder, watch, restarts = train(folder, server, options.minutes)
            # Already now: the delivery may take long, and may fail.
            print(json.dumps({**facts(run_folder), **watch.figures()}, indent=1), flush=True)
            deliver(folder)
        wrong, points = differences(run_folder, folder / "server" / DATABASE)
        with Server(folder / "another", empty) as server:
            copied = copy_to(run_folder, folder / "copy", server.uri)
            sync_seconds = deliver(folder / "copy")
        wrong_after_sync, _ = differences(copied, folder / "another" / DATABASE)
        figures = {
            "minutes": options.minutes,
            "restarts_of_the_server": restarts,
            **facts(run_folder),
            "points_in_mlflow": points,
            "points_lost_doubled_or_wrong": wrong,
            "sync_to_an_empty_server": {
                "seconds": sync_seconds,
                "points_lost_doubled_or_wrong": wrong_after_sync,
            },
            "processes": watch.figures(),
        }
    print(json.dumps(figures, indent=1))
    if options.report:
        options.report.write_text(json.dumps(figures, indent=1) + "\n")
    elif is_whole(parser, options):
        save(NAME, **figures)
    if wrong or wrong_after_sync:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

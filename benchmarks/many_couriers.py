"""Measure what two hundred couriers do to one MLflow server with PostgreSQL.

    python benchmarks/many_couriers.py [--couriers 200] [--seconds 120] [--workers 2] [--quick]

Couriers, server and PostgreSQL share the machine. One process plays the trainings: each writes ten
steps a second with three metrics, and one report a second with five, as a real run does. All end
at the same moment. Each courier is a process of its own. They are forked from one that has imported
MLflow, because two hundred imports would take longer than all the rest.

- lag: how old is the oldest step that PostgreSQL lacks, while the runs train?
- end: how long after the common end does the last courier have everything in MLflow?
- costs: the processor time of couriers, server and database, and the requests.

In the end PostgreSQL must have every value of every run once, and every run's end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from harness import HERE, save
from sqlalchemy import Connection, create_engine, text

from rankzero.events import Event, RunEnded, RunStarted, StepsLogged
from rankzero.mlflow_store.server import environment
from rankzero.run_store import run_locks
from rankzero.run_store.attempt import LiveAttempt
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import Journal
from rankzero.tracking import courier, open_run
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.trial_deliverers import TrialDeliverers

sys.path.insert(0, str(HERE.parent / "tests"))

from support.stores import Server, private_postgres

STEPS = 10  # a second
METRICS = ("train/loss", "train/accuracy", "train/gradient_norm")
REPORTED = ("lr", *(f"throughput/{name}" for name in ("samples_per_second", "step_seconds")))
REPORTED = (*REPORTED, "throughput/data_wait_fraction", "throughput/model_flops")
WANTED_END = 60.0


@dataclasses.dataclass
class Training:
    """A run that another process delivers."""

    folder: RunFolder
    journal: Journal
    pipe: int
    """Its end tells the courier that the recorder has ended."""
    courier: int
    """The number of the process."""


def started(root: Path, earlier: Sequence[Training], uri: str, seconds: int) -> Training:
    """Make a run, and fork its courier."""
    number = len(earlier)
    identity = Identity(f"run-{number:03d}", f"{number:032x}", "many", uri)
    folder = RunFolder.create(root, identity)
    journal = Journal(folder.events)
    params = {"lr": f"{number / 1e3:g}", "train.batch_size": "32"}
    journal(RunStarted(time.time(), params, {"rankzero.host": "here"}, 1, 0, seconds * STEPS))
    token = run_locks.claim(folder, 0).token
    reader, writer = os.pipe()
    if (process := os.fork()) == 0:
        # Only the parent may hold the ends of the pipes.
        for pipe in (writer, *(one.pipe for one in earlier)):
            os.close(pipe)
        code = 1
        with contextlib.suppress(BaseException):
            courier.deliver_attempt(
                LiveAttempt(folder, 0, token, reader),
                Deliverer(folder, 0),
                TrialDeliverers(folder),
                reader,
            )
            code = 0
        os._exit(code)
    os.close(reader)
    return Training(folder, journal, writer, process)


def second(first: int) -> list[Event]:
    """Return the events of one second, from this step on."""
    steps = list(range(first, first + STEPS))
    now = time.time()
    values = {name: [1.0 / step for step in steps] for name in METRICS}
    reported = {name: [float(steps[-1])] for name in REPORTED}
    return [StepsLogged(steps, [now] * STEPS, values), StepsLogged(steps[-1:], [now], reported)]


def lag(store: Connection, trainings: int, at: dict[int, float]) -> float:
    """Return the age of the oldest step that the database lacks."""
    query = "SELECT max(step) FROM metrics WHERE key = 'train/loss' GROUP BY run_uuid"
    newest = [row[0] for row in store.execute(text(query))]
    least = min(newest) if len(newest) == trainings else 0
    missing = [when for step, when in at.items() if step > least]
    return time.time() - min(missing) if missing else 0.0


def processor_seconds(processes: Sequence[psutil.Process]) -> float:
    found = 0.0
    for one in processes:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            found += times.user + times.system
            # PostgreSQL's processes come and go with the connections.
            found += times.children_user + times.children_system
    return found


def check(store: Connection, trainings: Sequence[Training], steps: int) -> None:
    """Raise AssertionError unless the database has every value of every run once, and its end."""
    query = "SELECT count(*) FROM runs WHERE status = 'FINISHED'"
    assert store.execute(text(query)).scalar() == len(trainings)
    query = "SELECT key, count(*), count(DISTINCT step), sum(value) FROM metrics "
    rows = [
        row
        for row in store.execute(text(f"{query} GROUP BY run_uuid, key"))
        if row[0] in (*METRICS, *REPORTED)
    ]
    assert len(rows) == len(trainings) * len((*METRICS, *REPORTED))
    total = sum(1.0 / step for step in range(1, steps + 1))
    for key, count, distinct, found in rows:
        expected = steps if key in METRICS else steps // STEPS
        assert count == distinct == expected, (key, count, distinct)
        assert key in REPORTED or abs(found - total) < 1e-6


def measure(options: argparse.Namespace, root: Path, uri: str) -> dict[str, Any]:
    server = Server(root, uri, options.workers)
    server.start()
    try:
        server.wait()
        # In this process, for all that are forked from it.
        open_run.connect(server.uri)
        runs, trainings = root / "runs", list[Training]()
        runs.mkdir()
        for _ in range(options.couriers):
            trainings.append(started(runs, trainings, server.uri, options.seconds))
        engine = create_engine(uri, isolation_level="AUTOCOMMIT")
        with engine.connect() as store:
            begin = time.monotonic()
            processes = _processes(server, [one.courier for one in trainings])
            before = {name: processor_seconds(those) for name, those in processes.items()}
            lags = train(trainings, options.seconds, store)
            elapsed = time.monotonic() - begin
            processes = _processes(server, [one.courier for one in trainings])
            used = {
                name: processor_seconds(those) - before[name] for name, those in processes.items()
            }
            end = seconds_to_the_end(trainings)
            check(store, trainings, options.seconds * STEPS)
            size = "SELECT pg_total_relation_size('metrics')::float / count(*) FROM metrics"
            value_bytes = float(store.execute(text(size)).scalar_one())
    finally:
        server.kill()
    return {
        "train_seconds": elapsed,
        "lags": lags,
        "end": end,
        "processor_seconds": used,
        "bytes_of_a_value": value_bytes,
    }


def train(trainings: Sequence[Training], seconds: int, store: Connection) -> list[float]:
    """Write all journals, second by second. Return the lag, every five seconds."""
    begin, at, lags = time.monotonic(), dict[int, float](), list[float]()
    for number in range(seconds):
        events = second(number * STEPS + 1)
        for training in trainings:
            for event in events:
                training.journal(event)
        at[(number + 1) * STEPS] = time.time()
        if number % 5 == 4:
            lags.append(lag(store, len(trainings), at))
            print(f"second {number + 1}: {lags[-1]:.1f} s behind", flush=True)
        time.sleep(max(0.0, begin + number + 1 - time.monotonic()))
    return lags


def seconds_to_the_end(trainings: Sequence[Training]) -> float:
    """End all trainings. Return how long the last courier takes to deliver everything."""
    began = time.monotonic()
    for training in trainings:
        training.journal(RunEnded(time.time(), "FINISHED", "trained", None, {"best": 1.0}))
        training.journal.close()
        os.close(training.pipe)
    for training in trainings:
        _, status = os.waitpid(training.courier, 0)
        assert status == 0, (training.folder.path, status)
    return time.monotonic() - began


def _processes(server: Server, couriers: Sequence[int]) -> dict[str, list[psutil.Process]]:
    family = psutil.Process(server.pid)
    databases = [one for one in psutil.process_iter() if one.name() == "postgres"]
    return {
        "couriers": [psutil.Process(one) for one in couriers],
        "server": [family, *family.children(recursive=True)],
        "PostgreSQL": databases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--couriers", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="to check that it works")
    options = parser.parse_args()
    if options.quick:
        options.couriers, options.seconds = 4, 10
    os.environ.update(environment({}))
    with tempfile.TemporaryDirectory() as folder, private_postgres() as uri:
        found = measure(options, Path(folder), uri)
    print(f"most behind while it trained   {max(found['lags']):.1f} s")
    print(f"everything in MLflow           {found['end']:.1f} s after the common end")
    print(f"a value in PostgreSQL          {found['bytes_of_a_value']:.0f} bytes, with its index")
    for name, value in found["processor_seconds"].items():
        print(f"{name:12} {value / found['train_seconds']:.2f} processors while it trained")
    if not options.quick:
        save("many_couriers", **{**vars(options), **found, "wanted": {"end": WANTED_END}})


if __name__ == "__main__":
    main()

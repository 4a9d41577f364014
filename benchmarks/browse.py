"""Measure how long browsing 5,000 runs takes, with `rankzero ui` and with plain `mlflow server`.

    python benchmarks/browse.py [--runs 5000] [--points 1000000] [--rounds 7] [--keep FOLDER]

Takes about 5 minutes. The store has a million metric points.

A real run creates the tables. The script writes the other runs in bulk, in the recorder's format.
It measures in Chromium with a warm cache, as for a returning user: from the address to the rows of
the table, and to a run's curve. Plain MLflow serves a copy of the store, made the way MLflow makes
one: without a write-ahead log and without a saved view.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import many_runs
from harness import HERE, environment, is_whole, rankzero, run, save
from playwright.sync_api import Page, sync_playwright

from rankzero.catalog import summary_cache

TABLE, RUN_PAGE, LIST = 2.0, 3.0, 1.0  # goals, in seconds
NAME = "bench"
EVERY_STEP, EVERY_EVALUATION = ("train/loss", "train/accuracy"), ("val/loss", "val/accuracy", "lr")
EVALUATIONS = 10
STUDY, TRIALS = 250, 49  # every 250th run is a study; the next 49 runs are its trials
ROWS = ".ag-center-cols-container .ag-row"
CURVE = ".scatterlayer path.js-line"
QUIET = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"


def fill(root: Path, runs: int, points: int) -> None:
    """Make a store with one real run and its copies."""
    words = [
        *(HERE.parent / "experiments" / "digits.py", "train.epochs=1"),
        *("--experiment-name", NAME, "--dir", root),
    ]
    run(rankzero("train", *words), environment(), root.parent)
    run(rankzero("sync", "--dir", root), environment(), root.parent)
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as database:
        _copies(database, runs, points // runs)
        database.commit()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.rmtree(root / "runs")
    many_runs.make(root / "runs", runs)
    for number in range(runs):
        _delivered(root / "runs" / f"bench-{number:05d}", f"{number:032x}")


def _copies(database: sqlite3.Connection, runs: int, points: int) -> None:
    template = database.execute("SELECT * FROM runs").fetchone()
    found = {
        table: database.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608
        for table in ("params", "tags")
    }
    latest = database.execute(
        'SELECT "key", value, timestamp, step, is_nan FROM latest_metrics'
    ).fetchall()
    for number in range(runs):
        key, name, began = (
            f"{number:032x}",
            f"bench-{number:05d}",
            1_800_000_000_000 + 60_000 * number,
        )
        place = template[11].replace(template[0], key)
        row = (
            key,
            name,
            *template[2:7],
            began,
            began + 14_000,
            *template[9:11],
            place,
            *template[12:],
        )
        database.execute(f"INSERT INTO runs VALUES ({','.join('?' * len(row))})", row)  # noqa: S608
        for table, rows in found.items():
            changed = [(k, _value(k, v, number, name), key) for k, v, _ in rows]
            changed += _parent(table, number, key)
            database.executemany(f"INSERT INTO {table} VALUES (?,?,?)", changed)  # noqa: S608
        database.executemany(
            "INSERT INTO latest_metrics VALUES (?,?,?,?,?,?)", [(*one, key) for one in latest]
        )
        database.executemany(
            "INSERT INTO metrics VALUES (?,?,?,?,?,0)", _points(key, began, number, points)
        )
    for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
        database.execute(f"DELETE FROM {table} WHERE run_uuid = ?", template[:1])  # noqa: S608


def _value(key: str, value: str, number: int, name: str) -> str:
    changed = {
        "lr": f"{(number + 1) / 1e5:g}",
        "mlflow.runName": name,
        "rankzero.uuid": f"{number:032x}",
    }
    return changed.get(key, value)


def _parent(table: str, number: int, key: str) -> list[tuple[str, str, str]]:
    """Return the tag that makes a run a trial, or nothing."""
    place = number % STUDY
    is_trial = table == "tags" and 0 < place <= TRIALS
    return [("mlflow.parentRunId", f"{number - place:032x}", key)] if is_trial else []


def _points(
    run_id: str, began: int, number: int, count: int
) -> Iterator[tuple[str, float, int, str, int]]:
    steps = (count - EVALUATIONS * len(EVERY_EVALUATION)) // len(EVERY_STEP)
    for step in range(1, steps + 1):
        yield from (
            (key, 1 / step + number / 1e4, began + 100 * step, run_id, step) for key in EVERY_STEP
        )
    for step in range(steps // EVALUATIONS, steps + 1, steps // EVALUATIONS):
        yield from ((key, 1 / step, began + 100 * step, run_id, step) for key in EVERY_EVALUATION)


def _delivered(folder: Path, run_id: str) -> None:
    """Record that MLflow has the complete run."""
    offsets = {"events.jsonl": (folder / "events.jsonl").stat().st_size}
    (folder / "delivery.json").write_text(
        json.dumps({"run_id": run_id, "experiment_id": "1", "offsets": offsets})
    )


def plain_copy(root: Path, target: Path) -> None:
    """Copy the database the way MLflow makes one, with a rollback journal."""
    target.mkdir()
    with (
        contextlib.closing(sqlite3.connect(root / "mlflow.db")) as ours,
        contextlib.closing(sqlite3.connect(target / "mlflow.db")) as copy,
    ):
        ours.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")


@contextlib.contextmanager
def served(command: Sequence[str], folder: Path) -> Iterator[None]:
    environ = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(address: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2):
            return
        time.sleep(0.2)
    raise TimeoutError(address)


def searched(address: str) -> float:
    """Return the seconds of the table's request, without a browser."""
    body = {
        "experiment_ids": ["1"],
        "max_results": 100,
        "order_by": ["attributes.start_time DESC"],
        "run_view_type": "ACTIVE_ONLY",
    }
    headers = {"Content-Type": "application/json"}
    url = f"{address}/ajax-api/2.0/mlflow/runs/search"
    start = time.perf_counter()
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60
    ) as answer:
        assert len(json.load(answer)["runs"]) == 100
    return time.perf_counter() - start


def until(page: Page, url: str, selector: str) -> float:
    """Return the seconds from the address to the first element that matches `selector`."""
    # An empty page first: an element of the previous page must not match.
    page.goto("about:blank")
    start = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.locator(selector).first.wait_for(state="attached", timeout=120_000)
    return time.perf_counter() - start


def measured(
    addresses: dict[str, str], runs: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return the readings: in each round one server after the other.

    A first round fills the caches and does not count.
    """
    readings: dict[str, dict[str, list[float]]] = {name: {} for name in addresses}
    last = f"#/experiments/1/runs/{runs - 1:032x}/model-metrics?workflowType=machine_learning"
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        pages = {
            name: browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
            for name in addresses
        }
        for turn in range(rounds + 1):
            for name, address in addresses.items():
                page, view = (
                    pages[name],
                    "&viewStateShareKey=rankzero" if name == "rankzero ui" else "",
                )
                page.add_init_script(QUIET)
                seen = {
                    "table's request": searched(address),
                    "table": until(
                        page,
                        f"{address}/#/experiments/1/runs?workflowType=machine_learning{view}",
                        ROWS,
                    ),
                    "run page's curve": until(page, f"{address}/{last}", CURVE),
                }
                for what, value in seen.items() if turn else ():
                    readings[name].setdefault(what, []).append(value)
        browser.close()
    return readings


def listed(root: Path, rounds: int) -> dict[str, list[float]]:
    """Return the readings of `rankzero runs`, without its cache and with it."""
    found: dict[str, list[float]] = {"first time": [], "again": []}
    for _ in range(rounds):
        (root / "runs" / summary_cache.HEADS).unlink(missing_ok=True)
        for what in found:
            found[what].append(many_runs.seconds(root, []))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--keep", type=Path, help="folder with the store, or for a new store")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = options.keep or Path(folder)
        root, copy = base / "mlruns", base / "plain"
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            fill(root, options.runs, options.points)
            plain_copy(root, copy)
        figures = _measure(root, copy, options)
    if is_whole(parser, options, "keep"):
        save("browse", runs=options.runs, points=options.points, **figures)


def _measure(root: Path, copy: Path, options: argparse.Namespace) -> dict[str, Any]:
    ports = {"rankzero ui": _free_port(), "mlflow server": _free_port()}
    plain = [
        *(sys.executable, "-m", "mlflow", "server"),
        *("--backend-store-uri", f"sqlite:///{copy}/mlflow.db"),
    ]
    commands = [rankzero("ui", "--dir", root, "--port", ports["rankzero ui"])]
    commands += [[*plain, "--port", str(ports["mlflow server"])]]
    addresses = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    listing = listed(root, options.rounds)
    with contextlib.ExitStack() as stack:
        for command in commands:
            stack.enter_context(served(command, copy))
        for address in addresses.values():
            wait_for(address)
        time.sleep(10)  # until the view is saved and the server's workers run
        browsing = measured(addresses, options.runs, options.rounds)
    readings = {**browsing, "rankzero runs": listing}
    for name, found in readings.items():
        for what, values in found.items():
            print(
                f"{name:14} {what:18} {statistics.median(values):5.2f} s  "
                f"({min(values):.2f} to {max(values):.2f})"
            )
    medians = {
        name: {what: statistics.median(values) for what, values in found.items()}
        for name, found in readings.items()
    }
    wanted = {"table": TABLE, "run page's curve": RUN_PAGE, "rankzero runs": LIST}
    return {"seconds": readings, "medians": medians, "wanted": wanted}


if __name__ == "__main__":
    main()

"""``rankzero runs``: the runs on this disk, newest first; those that died without a word get their end."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rankzero.cli.view import duration
from rankzero.tracking import stale, sync
from rankzero.tracking.catalog import Listed, listed

COLOURS = {
    "FINISHED": "green",
    "FAILED": "red",
    "DIED": "red",
    "KILLED": "yellow",
    "RUNNING": "cyan",
    "STARTING": "cyan",
}
SILENT_SECONDS = 120.0
PATIENCE_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="the trials of searches, too")
    parser.add_argument("-n", type=int, default=20, dest="limit", help="how many (default: 20)")


def run(arguments: argparse.Namespace) -> int:
    runs = arguments.dir / "runs"
    if _close_stale(runs):
        print()
    found = [one for one in listed(runs) if arguments.all or one.parent is None]
    if not found:
        print(f"no runs in {arguments.dir}: start one with `rankzero train experiments/digits.py`")
        return 0
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "status", "goal", "samples/s", "age", ""):
        table.add_column(heading, justify="right" if heading in ("samples/s", "age") else "left", no_wrap=True)
    for one in found[: arguments.limit]:
        table.add_row(*_cells(one))
    Console(soft_wrap=True).print(table)
    return 0


def _close_stale(runs: Path) -> bool:
    """End the runs that say RUNNING and are not, here and in MLflow; return whether there were any."""
    found = [one.folder for one in listed(runs) if one.status == "DIED" and stale.is_stale(one.folder)]
    for folder in found:
        print(f"{folder.path.name}: FAILED, {stale.close(folder)}", flush=True)
    for folder in found:
        result = sync.deliver(folder, patience=PATIENCE_SECONDS)
        if result.pending:
            print(f"{folder.path.name}: MLflow does not know yet ({result.error or 'no answer'}): rankzero sync")
    return bool(found)


def _note(one: Listed) -> str:
    if one.status == "RUNNING":
        quiet = stale.silence(one.folder)
        return f"silent for {duration(quiet)}" if quiet > SILENT_SECONDS else ""
    return "undelivered: rankzero sync" if one.undelivered else ""


def _cells(one: Listed) -> tuple[str, ...]:
    colour = COLOURS[one.status]
    goal = "" if one.best is None else f"{one.goal} {one.best:.4f}"
    speed = "" if one.samples_per_second is None else f"{one.samples_per_second:,.0f}"
    return one.name, f"[{colour}]{one.status}[/]", goal, speed, duration(time.time() - one.started), _note(one)

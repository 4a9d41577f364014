"""``rankzero runs``: the runs on this disk, newest first."""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.table import Table

from rankzero.cli.view import duration
from rankzero.tracking.catalog import Listed, listed

COLOURS = {"FINISHED": "green", "FAILED": "red", "DIED": "red", "KILLED": "yellow", "RUNNING": "cyan"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="the trials of searches, too")
    parser.add_argument("-n", type=int, default=20, dest="limit", help="how many (default: 20)")


def run(arguments: argparse.Namespace) -> int:
    found = [one for one in listed(arguments.dir / "runs") if arguments.all or one.parent is None]
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


def _cells(one: Listed) -> tuple[str, ...]:
    colour = COLOURS[one.status]
    goal = "" if one.best is None else f"{one.goal} {one.best:.4f}"
    speed = "" if one.samples_per_second is None else f"{one.samples_per_second:,.0f}"
    waiting = "undelivered: rankzero sync" if one.undelivered and one.status != "RUNNING" else ""
    return one.name, f"[{colour}]{one.status}[/]", goal, speed, duration(time.time() - one.started), waiting

"""``rankzero logs RUN [--follow] [--rank R]``: what its ranks printed; with --follow, its live display until it ends.

The display reads the run's files, from a process of its own: whatever becomes of it, the run goes on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rankzero.catalog import lookup
from rankzero.catalog.summary import read_summary
from rankzero.cli.display.live import Console
from rankzero.errors import FAILED, FINISHED, RESUMABLE, UserError
from rankzero.events import RunEnded
from rankzero.experiment import Goal
from rankzero.launch.agent import log_files
from rankzero.reporting.run_facts import goal_of
from rankzero.run_store import claims
from rankzero.run_store.folder import RunFolder

LOOK_SECONDS = 0.2
RESTART_SECONDS = (
    5.0  # what a run that failed gets to begin again: a restart, or a smaller micro-batch
)
SILENT_SECONDS = (
    20.0  # without a process that writes: until a run begins, or its recorder has said how it ended
)
EXIT_CODES = {"FINISHED": FINISHED, "FAILED": FAILED, "KILLED": RESUMABLE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_name", metavar="RUN", help="the run's name or its MLflow run id")
    parser.add_argument(
        "--follow",
        "-f",
        action="store_true",
        help="go on until the run ends; Ctrl-C leaves it alone",
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="of this machine, by local rank (default: all; with --follow rank 0)",
    )


def run(arguments: argparse.Namespace) -> int:
    folder = lookup.require(arguments.dir / "runs", arguments.run_name)
    if arguments.follow:
        return follow(folder, arguments.dir, arguments.rank or 0)
    found = ranks(folder)
    if arguments.rank is not None and arguments.rank not in found:
        known = (
            f"its ranks here are {', '.join(map(str, found))}" if found else "it keeps no logs here"
        )
        raise UserError(f"{folder.path.name} has no output of rank {arguments.rank}: {known}")
    shown = found if arguments.rank is None else [arguments.rank]
    for rank in shown:
        show(folder, rank, f"[{rank}] " if len(shown) > 1 else "")
    return FINISHED


def ranks(folder: RunFolder) -> list[int]:
    """Return the local ranks whose output is kept on this machine."""
    names = {
        path.name for path in (folder.path / "logs").glob("*/attempt_*/*") if path.name.isdigit()
    }
    return sorted(map(int, names))


def show(folder: RunFolder, rank: int, prefix: str = "") -> None:
    """Print all that a rank has printed, its errors last, attempt by attempt."""
    for path in log_files(folder.path / "logs", rank):
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                print(prefix + line.rstrip("\n"))


def follow(folder: RunFolder, root: Path, rank: int) -> int:
    """Show the run as the command that started it does, until it ends; return that command's exit code."""
    console = Console(folder, _goal(folder), root, rank)
    try:
        show(folder, rank)
        console.catch_up()
        if console.ended is None:
            with console:
                _wait_for_the_end(folder, console)
    except KeyboardInterrupt:
        console.notice(f"detached; {folder.path.name} goes on")
        return FINISHED
    if console.ended is None:
        console.notice(
            f"{folder.path.name} has died without a word; rankzero sync {folder.path.name} closes it"
        )
        return FAILED
    console.result(console.ended)
    return EXIT_CODES[console.ended.status]


def _wait_for_the_end(folder: RunFolder, console: Console) -> None:
    """Return once the run has ended for good, or nobody is left to say so."""
    alive = time.monotonic()
    while console.ended is not None or time.monotonic() - alive < SILENT_SECONDS:
        if console.ended is not None and not _may_begin_again(console.ended):
            return
        if console.ended is None and claims.writer_lives(folder):
            alive = time.monotonic()
        time.sleep(LOOK_SECONDS)


def _may_begin_again(ended: RunEnded) -> bool:
    return ended.status == "FAILED" and time.time() - ended.time < RESTART_SECONDS


def _goal(folder: RunFolder) -> Goal:
    return goal_of(read_summary(folder).params) or Goal()

"""``rankzero logs RUN [--follow] [--rank R]``: the ranks' output, or the live display of a run."""

from __future__ import annotations

import argparse
import sys
import time

from rankzero.catalog import command_lines
from rankzero.catalog.summary import read_summary
from rankzero.cli import options
from rankzero.cli.display.live import Console
from rankzero.cli.display.terminal import warn_if_interrupt_is_ignored
from rankzero.errors import FAILED, FINISHED, RESUMABLE, UserError
from rankzero.experiment import Goal
from rankzero.launch.agent import log_files
from rankzero.mlflow_store import named_runs
from rankzero.reporting.run_facts import goal_of
from rankzero.run_store import run_locks
from rankzero.run_store.folder import RunFolder

_LOOK_SECONDS = 0.2
# A run that failed may start again: after a restart, or with a smaller micro-batch.
_RESTART_SECONDS = 5.0
# Without a live writer: until a run starts, or its recorder has written how it ended.
_SILENT_SECONDS = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run(parser)
    follow = "show the run live until it ends; Ctrl-C ends only the display"
    parser.add_argument("--follow", "-f", action="store_true", help=follow)
    rank = "a local rank of this machine (default: all; with --follow rank 0)"
    parser.add_argument("--rank", type=int, metavar="R", help=rank)


def run(arguments: argparse.Namespace) -> int:
    folder = named_runs.require(arguments.dir / "runs", arguments.run_name)
    if arguments.follow:
        if folder.is_elsewhere:
            here = command_lines.line(folder.root, "logs", folder.path.name)
            why = "the journal of rank 0 is not on this disk: follow the run on its machine"
            raise UserError(f"{why}; `{here}` shows what the ranks here printed")
        warn_if_interrupt_is_ignored()
        return _follow(folder, arguments.rank or 0)
    names = {path.name for path in (folder.path / "logs").glob("*/attempt_*/*")}
    found = sorted(int(name) for name in names if name.isdigit())
    if arguments.rank is not None and arguments.rank not in found:
        ranks = ", ".join(map(str, found))
        known = f"its ranks here are {ranks}" if found else "it has no logs here"
        raise UserError(f"{folder.path.name} has no output of rank {arguments.rank}: {known}")
    shown = found if arguments.rank is None else [arguments.rank]
    printed = [_show(folder, rank, f"[{rank}] " if len(shown) > 1 else "") for rank in shown]
    if not any(printed):
        # Not into a pipe, whose reader expects what the ranks printed.
        print(f"{folder.path.name}: its ranks printed nothing on this machine", file=sys.stderr)
    return FINISHED


def _show(folder: RunFolder, rank: int, prefix: str = "") -> bool:
    """Print a rank's output by attempt, standard error last. Return whether there was any."""
    printed = False
    for path in log_files(folder.path / "logs", rank):
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            # Line by line: a rank may have printed gigabytes.
            for line in file:
                print(prefix + line.rstrip("\n"))
                printed = True
    return printed


def _follow(folder: RunFolder, rank: int) -> int:
    """Show the run as the command that trains it does; return that command's exit code."""
    name, goal = folder.path.name, goal_of(read_summary(folder).params) or Goal()
    console = Console(folder, goal, rank)
    try:
        _show(folder, rank)
        # Before the thread starts, so that nothing is shown twice.
        console.catch_up()
        if console.ended is None:
            with console:
                _wait_for_the_end(folder, console)
    except KeyboardInterrupt:
        # The display only reads the run's files, so its end does not affect the run.
        console.notice(f"detached; {name} continues")
        return FINISHED
    if console.ended is None:
        again = command_lines.line(folder.root, "sync", name)
        console.notice(f"{name} died and its end was not recorded: {again} records it")
        return FAILED
    console.result(console.ended)
    return _exit_code(folder, console.ended.status)


def _exit_code(folder: RunFolder, status: str) -> int:
    if status == "KILLED":
        return RESUMABLE if any(folder.checkpoints.glob("step_*")) else FAILED
    return FINISHED if status == "FINISHED" else FAILED


def _wait_for_the_end(folder: RunFolder, console: Console) -> None:
    """Return once the run has ended for good, or no process is left that could write its end."""
    alive = time.monotonic()
    while console.ended is not None or time.monotonic() - alive < _SILENT_SECONDS:
        ended = console.ended
        if ended is None:
            if run_locks.writer_lives(folder):
                alive = time.monotonic()
        elif ended.status != "FAILED" or time.time() - ended.time >= _RESTART_SECONDS:
            return
        time.sleep(_LOOK_SECONDS)

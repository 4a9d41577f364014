"""``rankzero runs [FILTER…]``: the runs on this disk. Records the end of runs that died."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from rankzero.catalog import command_lines, dead_runs, filters, lookup
from rankzero.catalog.summary import ELSEWHERE, Summary
from rankzero.cli.display.terminal import table_console
from rankzero.errors import UserError
from rankzero.reporting.run_report import duration
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.location import is_offline
from rankzero.run_store.names import printable
from rankzero.scalars import rounded, shown

_COLOURS = {
    "FINISHED": "green",
    "FAILED": "red",
    "DIED": "red",
    "KILLED": "yellow",
    "RUNNING": "cyan",
    "STARTING": "cyan",
    ELSEWHERE: "dim",
}
# A running run that wrote nothing for so long is marked as silent.
_SILENT_SECONDS = 120.0
# A list must not wait for a server that does not answer.
_PATIENCE_SECONDS = 5.0
_SHOWN, _INCOMPLETE = 20, "*"
# Keys that need no additional column.
_IN_THE_TABLE = ("run", "status", "goal", "best", "samples/s", "size", "age", "started")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "filters",
        metavar="FILTER",
        nargs="*",
        help="KEY=VALUE, or with !=, <, <=, >, >=: a column, param, metric or tag; all must hold; "
        "VALUE may contain * and ?",
    )
    sort = "sort by a column, param, metric or tag; -KEY: largest first"
    parser.add_argument("--sort", metavar="KEY", help=sort)
    array = "print everything about the runs as a JSON array, one run per line"
    parser.add_argument("--json", action="store_true", help=array)
    children = "include the runs of searches and repeats"
    parser.add_argument("--all", action="store_true", help=children)
    limit = f"the number of runs (default: {_SHOWN}; with --json all)"
    parser.add_argument("-n", type=int, dest="limit", help=limit)


def run(arguments: argparse.Namespace) -> int:
    if (arguments.limit or 0) < 0:
        raise UserError(f"-n {arguments.limit}: give the number of runs to show, 0 or more")
    conditions = [filters.parse(word) for word in arguments.filters]
    # All objects of a long list stay to the end. The collector would walk them again and again.
    gc.disable()
    runs = _closed(arguments.dir / "runs")
    among = filters.candidates(runs, conditions, everything=arguments.all)
    found = filters.select(among, conditions, arguments.sort)
    if arguments.json:
        print("[" + ",\n".join(json.dumps(as_json(one)) for one in found[: arguments.limit]) + "]")
    elif not runs:
        print(f"no runs in {arguments.dir}: begin with `rankzero init my_experiment.py`")
    else:
        asked = [condition.key for condition in conditions]
        asked += [arguments.sort.lstrip("-")] if arguments.sort else []
        _show(found, _SHOWN if arguments.limit is None else arguments.limit, asked)
    return 0


def as_json(one: Summary) -> dict[str, Any]:
    """Return a run's fields for JSON, the same keys for every run."""
    # JSON has no NaN and no infinity.
    return {key: _finite(value) for key, value in one.fields().items()}


def _closed(runs: Path) -> list[Summary]:
    """Return all runs, after recording the end, here and in MLflow, of those that died."""
    listed = lookup.listed(runs, lambda text: print(f"not listed: {text}", file=sys.stderr))
    died = [one.folder for one in listed if one.status == "DIED"]
    found = [folder for folder in died if dead_runs.is_stale(folder) and _is_closed(folder)]
    if not found:
        return listed
    # MLflow shows a run as RUNNING until its end is delivered, and nobody else would do that.
    _deliver([] if is_offline() else found)
    return lookup.listed(runs)


def _deliver(folders: Sequence[RunFolder]) -> None:
    """Deliver runs, and print which ones MLflow lacks. Ask a store that is away for one."""
    # A list seldom needs it, and it imports many modules.
    from rankzero.tracking import delivery_status, sync

    failing = dict[str, str]()
    for folder in folders:
        uri, before = folder.identity.tracking_uri, delivery_status.status(folder).pending
        if (why := failing.get(uri)) is None:
            try:
                result = sync.deliver(folder, patience=_PATIENCE_SECONDS)
            except (UserError, OSError) as error:
                print(f"{folder.path.name}: {error}", file=sys.stderr)
                continue
            if not result.pending:
                continue
            why = result.error or "no answer"
            if sync.is_away(folder, before):
                failing[uri] = why
        again = command_lines.line(folder.root, "sync")
        print(f"{folder.path.name}: not in MLflow yet ({why}): {again}", file=sys.stderr)


def _is_closed(folder: RunFolder) -> bool:
    """Record the end of a dead run; return whether that worked. Prints what happened."""
    name = folder.path.name
    try:
        reason = dead_runs.close(folder)
    except OSError as error:  # a full disk, or the folder of another user: others are listed
        print(f"{name}: its end cannot be recorded: {error}", file=sys.stderr, flush=True)
        return False
    print(f"{name}: FAILED, {reason}", file=sys.stderr, flush=True)
    return True


def _show(found: Sequence[Summary], limit: int, asked: Sequence[str]) -> None:
    """Print the first runs as a table, with a column for each key in `asked`."""
    terminal = table_console()
    # With one goal its name is the heading, else it stands in each row.
    goals = {one.goal for one in found[:limit] if one.best is not None}
    goal = goals.pop() if len(goals) == 1 else "goal"
    extra = [key for key in dict.fromkeys(asked) if key not in (*_IN_THE_TABLE, goal)]
    table = Table(box=None, pad_edge=False)
    numeric = ("samples/s", "size", "age")
    for heading in ("run", "status", goal, *numeric, *extra):
        justify: Literal["left", "right"] = "right" if heading in numeric else "left"
        table.add_column(escape(heading), justify=justify, overflow="fold")
    for one in found[:limit]:
        table.add_row(*_cells(one, goal), *(_cell(one, key) for key in extra))
    terminal.print(table)
    if any(_lacks(one) for one in found[:limit]):
        again = escape(command_lines.line(found[0].folder.root, "sync"))
        terminal.print(f"{_INCOMPLETE} not everything is in MLflow: {again}", style="dim")
    if len(found) > limit:
        terminal.print(f"{limit} of {len(found):,} runs; -n {len(found)} shows all", style="dim")
    if not found:
        terminal.print("no run matches")


def _cells(one: Summary, goal: str) -> tuple[str, ...]:
    # The heading has the goal's name if all runs have the same goal.
    named = "" if one.goal == goal else f"{escape(one.goal)} "
    best = "" if one.best is None else f"{named}{shown(one.best)}"
    speed = "" if one.samples_per_second is None else shown(one.samples_per_second)
    mark = _INCOMPLETE if _lacks(one) else ""
    status = f"[{_COLOURS[one.status]}]{one.status}{mark}[/]"
    quiet = dead_runs.silence(one.folder) if one.status == "RUNNING" else 0.0
    if quiet > _SILENT_SECONDS:
        status += f", silent for {age_text(quiet)}"
    age = age_text(time.time() - one.started)
    return _cell(one, "run"), status, best, speed, size_text(one.bytes), age


def size_text(count: float) -> str:
    """Return a number of bytes in the unit that leaves it below 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def age_text(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _lacks(one: Summary) -> bool:
    return one.undelivered and not one.lives


def _cell(one: Summary, key: str) -> str:
    if key == "duration":
        return duration(one.seconds)
    value = filters.value_of(one, key)
    if isinstance(value, float):
        return shown(value)
    if isinstance(value, str) and key not in filters.COLUMNS:
        value = rounded(value)
    # A user of MLflow may have put anything into a name, also a terminal's control characters.
    return "" if value is None else escape(printable(str(value)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not abs(value) < float("inf") else value

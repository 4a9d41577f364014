"""``rankzero report RUN|STUDY``: its result. ``rankzero report A B…``: runs compared."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, TableElement
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rankzero.catalog import lookup
from rankzero.catalog.summary import read_summary
from rankzero.cli.display.terminal import is_interactive, print_table, table_console
from rankzero.errors import UserError
from rankzero.mlflow_store import named_runs
from rankzero.reporting import comparison, run_report
from rankzero.reporting.comparison import RunSide
from rankzero.run_store import provenance

_PATCH_LINES = 40
_SHORT = {"samples_per_second": "samples/s", "batch_size": "batch"}


class _FoldedTable(TableElement):
    """A table that folds a long word, which rich would cut off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            if isinstance(part, Table):
                for column in part.columns:
                    column.overflow = "fold"
            yield part


class _Page(Markdown):
    elements: ClassVar = {**Markdown.elements, "table_open": _FoldedTable}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a run or a study; several runs are compared"
    parser.add_argument("names", metavar="RUN", nargs="+", help=what)
    parser.add_argument("--all", action="store_true", help="show also what the runs have in common")
    page = "write a page with curves, pictures and settings instead, as one file to be mailed"
    parser.add_argument("--html", type=Path, metavar="FILE", help=page)
    parser.add_argument("--storage", help="the study's database (default: studies.db in --dir)")


def run(arguments: argparse.Namespace) -> int:
    runs, names = arguments.dir / "runs", arguments.names
    if arguments.html is not None:
        from rankzero.reporting import html_report

        for what in html_report.write(arguments.html, [named_runs.require(runs, n) for n in names]):
            print(f"note: the page lacks {what}", file=sys.stderr)
        print(arguments.html)
        return 0
    if len(names) > 1:
        sides = comparison.sides_of([named_runs.require(runs, name) for name in names])
        _show_differences(sides, everything=arguments.all)
        return 0
    folder = lookup.find(runs, names[0], strict=True)
    # Only a study's run has this param.
    is_study = folder is None or "search.sampler" in read_summary(folder).params
    name = names[0] if folder is None else folder.path.name
    if arguments.storage:
        _show_study(arguments, name)
        return 0
    # A study may have its run on another disk, or its trials in another database.
    if is_study and (arguments.dir / "studies.db").exists():
        with contextlib.suppress(UserError):
            _show_study(arguments, name)
            return 0
    text = run_report.page(folder or named_runs.require(runs, name))
    if is_interactive():
        table_console().print(_Page(text, code_theme="ansi_dark"))
    else:
        print(text, end="")
    return 0


def _show_differences(sides: Sequence[RunSide], *, everything: bool) -> None:
    """Print what differs between runs, in one table so that the columns are aligned."""
    names, found = [one.name for one in sides], comparison.sections(sides, everything=everything)
    table = Table("", *map(escape, names), "", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    # A pipe has no width that folds a command, which would widen each line of the table.
    code = found.get("Code", []) if not is_interactive() else []
    commands = [row for row in code if row.key == "commands"]
    for title, rows in found.items():
        if kept := [row for row in rows if row not in commands]:
            table.add_row(Text(title, style="bold"))
        for row in kept:
            cells = (f"  {row.key}", *row.values, row.change)
            table.add_row(*map(Text, cells))  # as Text: values may look like markup
    terminal = table_console()
    terminal.print(table)
    for row in commands:
        terminal.print(Text("\n".join(map("{}:\n{}".format, names, row.values))))
    for other in sides[1:]:
        _show_code(terminal, sides[0], other, None if everything else _PATCH_LINES)


def _show_code(terminal: Console, left: RunSide, right: RunSide, limit: int | None) -> None:
    """Print the commits between two runs and the difference of their uncommitted changes."""
    commits = [side.facts.environment.get("mlflow.source.git.commit", "") for side in (left, right)]
    if commits[0] != commits[1] and (
        changed := provenance.changed_between(Path.cwd(), commits[0], commits[1])
    ):
        terminal.print(Text(changed.rstrip()))
    # Uncommitted changes were saved with each run. The commits themselves are in git.
    lines = list(comparison.patches(left.patch, right.patch))
    if lines:
        terminal.print(Text(f"Uncommitted changes: - {left.name}, + {right.name}", style="bold"))
    for line in itertools.islice(lines, limit):
        colour = {"-": "red", "+": "green"}.get(line[:1], "")
        terminal.print(Text(f"  {line}", style=colour))
    if limit is not None and len(lines) > limit:
        terminal.print(f"  {len(lines) - limit} more lines: --all", style="dim")


def _show_study(arguments: argparse.Namespace, name: str) -> None:
    """Print a study's trials and its verdict. Raises UserError if there is no such study."""
    # Optuna takes a second to import, and a report on a run does not need it.
    from rankzero.tuning.options import default_storage
    from rankzero.tuning.reports.study_run import SHOWN_COLUMNS, own_settings, texts_of
    from rankzero.tuning.study import find_study
    from rankzero.tuning.verdict import confirm

    storage = arguments.storage or default_storage(arguments.dir)
    study = find_study(storage, name)
    trials, facts, terminal = study.trials(), study.facts, table_console()
    own = own_settings(trials)
    head = [*(_SHORT.get(column, column) for column in SHOWN_COLUMNS), *own.values()]
    rows = [texts_of(trial, own) for trial in trials]
    print_table(f"{study.name}: {len(trials)} trials", head, rows)
    # In a column of its own, a reason would leave no room for the numbers.
    for trial in trials:
        if reason := trial.facts.get("reason"):
            terminal.print(Text(f"trial {trial.number:3}: {reason}"))
    for number, values in confirm.rows(facts):
        terminal.print(Text(f"confirmed  trial {number:>3}: {values}"))
    if "objective" in facts:
        terminal.print(Text(f"objective: {facts['objective']}"))
    unfinished = "No verdict yet: the same search command resumes it, with more --minutes if they"
    verdict = facts.get("sentence") or f"{unfinished} were too short."
    terminal.print(Text(verdict))

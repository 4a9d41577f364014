"""``rankzero report RUN|STUDY``: what became of it. ``rankzero report A B``: what differs between two runs."""

from __future__ import annotations

import argparse
import contextlib
import itertools
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from rankzero.catalog import lookup
from rankzero.cli.display.terminal import is_interactive, table_console
from rankzero.errors import UserError
from rankzero.events import RunStarted
from rankzero.reporting import comparison, run_facts, run_report
from rankzero.reporting.comparison import RunSide, Section
from rankzero.reporting.run_page import page, status
from rankzero.run_store import provenance
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read

PATCH_LINES = 40
STUDIES = "studies.db"
A_SEARCH = "search.sampler"  # a param that only studies have


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        metavar="RUN",
        nargs="+",
        help="a run's or a study's name; two runs: how they differ",
    )
    parser.add_argument("--all", action="store_true", help="of two runs, what is alike, too")
    parser.add_argument(
        "--storage", help="the study's database (default: studies.db beside the runs)"
    )


def run(arguments: argparse.Namespace) -> int:
    runs, names = arguments.dir / "runs", arguments.names
    if len(names) > 2:
        raise UserError(
            f"a report is of one run, or of the differences between two; not of {len(names)}"
        )
    if len(names) == 2:
        show_differences(
            *(side(lookup.require(runs, name)) for name in names), everything=arguments.all
        )
        return 0
    folder = lookup.find(runs, names[0])
    if arguments.storage or (folder and is_study(folder)):
        _show_study(arguments, names[0])
    elif folder is not None:
        show_markdown(page(folder))
    else:
        _show_study_of_others(arguments, names[0])
    return 0


def is_study(folder: RunFolder) -> bool:
    """Tell whether the run is a search."""
    head, _ = read(folder.events, 0, 1)
    return any(isinstance(event, RunStarted) and A_SEARCH in event.params for event in head)


def show_markdown(text: str) -> None:
    """Print Markdown: set for a terminal, as it is into a pipe."""
    text, terminal = run_report.for_terminal(text), table_console()
    if is_interactive():
        terminal.print(Markdown(text, code_theme="ansi_dark"))
    else:
        print(text, end="")


def side(folder: RunFolder) -> RunSide:
    """Return all that is compared of a run, from its folder."""
    return RunSide(
        name=folder.identity.name,
        status=status(folder),
        facts=run_facts.fold(folder.all_events()),
        packages=provenance.read_packages(folder.artifacts),
        patch=provenance.read_diff(folder.artifacts),
    )


def show_differences(left: RunSide, right: RunSide, *, everything: bool = False) -> None:
    """Print what differs between two runs, side by side."""
    terminal = table_console()
    terminal.print(table(left, right, comparison.sections(left, right, everything=everything)))
    _show_code(terminal, left, right, None if everything else PATCH_LINES)


def table(left: RunSide, right: RunSide, sections: list[Section]) -> Table:
    """Return the differences as one table, so that their columns stand below each other."""
    shown = Table("", left.name, right.name, "", box=None, pad_edge=False)
    for column in shown.columns:
        column.overflow = "fold"
    for section in sections:
        shown.add_row(Text(section.title, style="bold"))
        for row in section.rows:
            shown.add_row(
                *map(Text, (f"  {row.key}", row.left, row.right, row.change))
            )  # values may look like markup
    return shown


def _show_code(terminal: Console, left: RunSide, right: RunSide, limit: int | None) -> None:
    commits = [one.facts.environment.get("mlflow.source.git.commit", "") for one in (left, right)]
    if commits[0] != commits[1] and (
        changed := provenance.changed_between(Path.cwd(), commits[0], commits[1])
    ):
        terminal.print(Text(changed.rstrip()))
    lines = list(comparison.patches(left.patch, right.patch))
    if lines:
        terminal.print(Text(f"Uncommitted changes: - {left.name}, + {right.name}", style="bold"))
    for line in itertools.islice(lines, limit):
        colour = {"-": "red", "+": "green"}.get(line[:1], "")
        terminal.print(Text(f"  {line}", style=colour))
    if limit is not None and len(lines) > limit:
        terminal.print(f"  {len(lines) - limit} more lines: --all", style="dim")


def _show_study(arguments: argparse.Namespace, name: str) -> None:
    from rankzero.cli.display import study_table
    from rankzero.tuning.study import default_storage

    study_table.show(arguments.storage or default_storage(arguments.dir), name)


def _show_study_of_others(arguments: argparse.Namespace, name: str) -> None:
    """Show a study without a run of its own here; where there is none either, say which runs there are."""
    if (arguments.dir / STUDIES).exists():
        with contextlib.suppress(UserError):
            return _show_study(arguments, name)
    lookup.require(arguments.dir / "runs", name)

"""``rankzero profile EXP [--nproc N] [key=value…]``: where the time of a step goes."""

from __future__ import annotations

import argparse

from rich.table import Table

from rankzero import config
from rankzero.cli.commands import compare, search
from rankzero.cli.display import delivery_notes
from rankzero.cli.display.live import program
from rankzero.cli.display.terminal import text_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    search.add_experiment_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from rankzero.compare import runner, tables

    with search.host(arguments) as host:
        described = host.describe(
            arguments.experiment, config.parse_assignments(arguments.settings), arguments.nproc
        )
        found = compare.compare_context(arguments, host, described, "profile")
        profile, folder = runner.profile(found, described.processes)
    table = Table(
        "operator", "ms a step", "share", "calls a step", title="top costs", title_justify="left"
    )
    for cost in profile.costs:
        table.add_row(
            cost.name, f"{cost.milliseconds:.3g}", f"{cost.share:.0%}", f"{cost.calls:.3g}"
        )
    terminal = text_console()
    terminal.print(table)
    terminal.print(tables.verdict(profile), soft_wrap=True)
    search.print_delivery(folder, offline=arguments.offline)
    search.print_line(
        f"trace: {folder.artifacts / 'profile'} (open in ui.perfetto.dev)\nlook:  {program()} ui"
    )
    return delivery_notes.exit_code(folder)

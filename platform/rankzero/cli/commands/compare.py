"""``rankzero compare EXP [--strategies single,ddp,…] [--nproc 1,2,4] [key=value…]``: one table of all ways to train."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import secrets
import sys
from typing import TYPE_CHECKING

from rich.table import Table

from rankzero import config
from rankzero.cli.commands import search
from rankzero.cli.display.live import program
from rankzero.cli.display.terminal import text_console
from rankzero.errors import UserError
from rankzero.mlflow_store import uris
from rankzero.run_store.folder import new_name
from rankzero.tuning.trials import describe
from rankzero.tuning.trials.host_process import Host

if TYPE_CHECKING:
    from rankzero.compare.runner import CompareContext


def add_arguments(parser: argparse.ArgumentParser) -> None:
    search.add_experiment_arguments(parser, nproc=False)
    parser.add_argument(
        "--strategies", help="which, with commas between (default: single,ddp; with GPUs dp, too)"
    )
    parser.add_argument(
        "--nproc", help="numbers of devices, with commas between (default: 1 and all GPUs, or 1,2)"
    )


def run(arguments: argparse.Namespace) -> int:
    from rankzero.compare import runner, tables
    from rankzero.compare.results import entries

    asked = [name.strip() for name in (arguments.strategies or "single,ddp").split(",")]
    entries(
        asked, numbers(arguments.nproc or "1,2")
    )  # mistakes are told before anything is started
    with contextlib.closing(Host(search.libraries(arguments))) as host:
        described = host.describe(
            arguments.experiment, config.parse_assignments(arguments.settings), 1
        )
        on_gpus = described.gpus > 0
        strategies = arguments.strategies or ("single,dp,ddp" if on_gpus else "single,ddp")
        counts = numbers(arguments.nproc or f"1,{described.gpus or 2}")
        plan = entries([name.strip() for name in strategies.split(",")], counts)
        found = made(arguments, host, described, "compare")
        rows, notes, folder = runner.compare(found, plan, sys.argv)
    head, body = tables.table(rows)
    table = Table(title="the same work, compared", title_justify="left", padding=(0, 0))
    for name in head:
        table.add_column(name, no_wrap=True)
    for line in body:
        table.add_row(*line)
    terminal = text_console()
    terminal.print(table)
    for text in [
        *(f"not run: {reason}" for reason in tables.reasons(rows)),
        *(f"not fair: {note}" for note in notes),
    ]:
        terminal.print(text, soft_wrap=True)
    terminal.print(tables.sentence(rows), soft_wrap=True)
    for note in search.delivery_lines(folder, offline=arguments.offline):
        search.say(note)
    search.say(f"look:  {program()} ui   run: {folder.path.name}")
    return 0 if any(row.speed_up is not None for row in rows) else 1


def made(
    arguments: argparse.Namespace, host: Host, described: describe.ExperimentDescription, verb: str
) -> CompareContext:
    """Return where to compare or profile: a run of its own, in the store that the command line names."""
    from rankzero.compare import runner

    reference = describe.mirrored(described)
    identity = search.identity_of(arguments, reference, described.processes, verb)
    identity = dataclasses.replace(
        identity, name=new_name(f"{identity.experiment}-{verb}"), uuid=secrets.token_hex(16)
    )
    if not arguments.offline:
        uris.prepare_store(identity.tracking_uri)
    return runner.CompareContext(
        host,
        reference,
        identity,
        arguments.dir / "runs",
        described.device,
        described.gpus,
        search.say,
        arguments.offline,
    )


def numbers(text: str) -> list[int]:
    """Return the whole numbers in ``1,2,4``. Raises UserError."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--nproc takes whole numbers with commas between, such as 1,2,4: got {text!r}"
        ) from None

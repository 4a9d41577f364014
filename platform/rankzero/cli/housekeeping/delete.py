"""``rankzero delete RUN…``: runs vanish from lists and from MLflow, and can be restored."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from rankzero.catalog import deleted, lookup
from rankzero.catalog.summary import read_summary
from rankzero.cli.commands.runs import age_text, size_text
from rankzero.cli.display.live import command
from rankzero.cli.display.terminal import table_console
from rankzero.errors import FAILED, FINISHED, UserError
from rankzero.housekeeping.deletion import Housekeeper, parts
from rankzero.launch.failures import reason
from rankzero.mlflow_store import named_runs
from rankzero.redaction.text import line_without_secrets
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.names import InvalidRunFolder, printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = "a run's name or its MLflow run id; a study's trials go with it"
    parser.add_argument("run_names", metavar="RUN", nargs="+", help=which)
    back = "bring deleted runs back"
    parser.add_argument("--restore", action="store_true", help=back)
    add_confirmation(parser)


def add_confirmation(parser: argparse.ArgumentParser) -> None:
    """Add ``--yes`` and ``--discard-undelivered``."""
    lose = "also runs of which MLflow lacks something"
    parser.add_argument("--discard-undelivered", action="store_true", help=lose)
    parser.add_argument("--yes", action="store_true", help="do not ask, for scripts")


def run(arguments: argparse.Namespace) -> int:
    runs, keeper = arguments.dir / "runs", Housekeeper(arguments.discard_undelivered)
    # All are checked first, so that a mistake deletes nothing.
    found = (_find(keeper, runs, name, arguments.restore) for name in arguments.run_names)
    wanted = [*dict.fromkeys(found)]
    if arguments.restore:
        return _restore(keeper, wanted)
    for name, folder in zip(lookup.shown_names(wanted), wanted, strict=True):
        obstacle = keeper.obstacle(folder)
        if obstacle is not None:
            raise UserError(f"{name} stays: {obstacle}")
    return delete(keeper, wanted, yes=arguments.yes)


def _find(keeper: Housekeeper, runs: Path, name: str, restore: bool) -> RunFolder:
    """Return the run of this name. Raises UserError if it goes with another one."""
    try:
        found = named_runs.require(runs, name, among_deleted=restore)
    except UserError:
        known = lookup.find(runs, name) if restore else None
        if known is None:
            raise
        # Its deletion may have been interrupted, or this disk does not know of one on its server.
        own = parts(known)
        if not any(map(deleted.is_hidden, own)) and not keeper.changed_on_servers(own)[0]:
            raise
        found = known
    parent = found.identity.parent
    above = None if parent is None else RunFolder(runs / parent)
    # Somebody may have removed that folder. In MLflow, a child may be deleted alone.
    if above and above.path.exists() and (not restore or deleted.is_hidden(above)):
        raise UserError(f"{found.path.name} belongs to {parent}: name that run")
    return found


def _restore(keeper: Housekeeper, folders: Sequence[RunFolder]) -> int:
    code = FINISHED
    for name, folder in zip(lookup.shown_names(folders), folders, strict=True):
        try:
            keeper.restore(folder)
            others = ", with all of its runs, also those deleted alone" if folder.children else ""
            print(f"{name} is back{others}")
        except Exception as error:
            if len(folders) == 1:
                raise
            print(line_without_secrets(f"still deleted: {name}: {reason(error)}"))
            code = FAILED
    return code


def delete(keeper: Housekeeper, folders: Sequence[RunFolder], *, yes: bool) -> int:
    """Show the runs, ask, and delete them; return the exit code."""
    show(keeper, folders)
    if not confirmed(f"delete {_count(folders)}", yes=yes):
        return FAILED
    gone, names, root = list[RunFolder](), lookup.shown_names(folders), folders[0].root
    for name, folder in zip(names, folders, strict=True):
        try:
            keeper.delete(folder)
            gone.append(folder)
        except Exception as error:  # the others can go nevertheless
            print(line_without_secrets(f"kept: {printable(name)}: {reason(error)}"))
    if gone:
        back = command(root, "delete", "--restore", names[0] if len(names) == 1 else "RUN")
        print(f"deleted {_count(gone)}; bring back: {back}")
        print(f"free the disk: {command(root, 'prune', '--deleted')}")
    return FINISHED if len(gone) == len(folders) else FAILED


def show(keeper: Housekeeper, folders: Sequence[RunFolder]) -> None:
    """Print the runs, and how many bytes of this machine they take."""
    table, total = Table(box=None, pad_edge=False), 0
    for heading in ("run", "status", "size", "age"):
        table.add_column(heading, overflow="fold")
    for name, folder in zip(lookup.shown_names(folders), folders, strict=True):
        try:
            one, count = read_summary(folder), keeper.bytes(folder)
        except InvalidRunFolder:  # another command has removed it
            continue
        total += count
        others = f" and {len(folder.children)} more" if folder.children else ""
        age = age_text(time.time() - one.started)
        table.add_row(escape(f"{name}{others}"), one.status, size_text(count), age)
    table_console().print(table)
    print(f"{_count(folders)}, {size_text(total)} with MLflow's files", flush=True)


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask on a terminal. Raises UserError where nobody can answer and `yes` was not said."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UserError(f"nobody is asked here: add --yes to {question}")
    with contextlib.suppress(EOFError):  # Ctrl-D
        return input(f"{question}? [y/N] ").strip().lower() in ("y", "yes")
    return False


def _count(folders: Sequence[RunFolder]) -> str:
    return "1 run" if len(folders) == 1 else f"{len(folders)} runs"

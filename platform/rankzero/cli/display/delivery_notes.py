"""Notes about the delivery to MLflow, which a command prints at its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rankzero.catalog import command_lines, lookup
from rankzero.cli.display.terminal import print_line
from rankzero.errors import FINISHED, NOT_DELIVERED
from rankzero.launch.signals import SignalForwarder
from rankzero.mlflow_store.patience import patience
from rankzero.reporting.delivery_problems import UNDELIVERED
from rankzero.run_store import disk, run_locks
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status, notification


def wait(
    folder: RunFolder,
    notice: Callable[[str], object],
    hurried: Callable[[], bool] = lambda: False,
    also: Sequence[str] = (),
) -> bool:
    """Wait for the delivery, or until `hurried()`; return whether MLflow has everything.

    `notice` gets what went wrong and what is still to come. `also`: what else MLflow lacks.
    """
    delivery = delivery_status.wait(folder, enough=lambda now: now.done or hurried())
    for line in delivery.trouble:
        if delivery.done or not line.startswith(UNDELIVERED):
            notice(line)
    if not delivery.done:
        why = delivery.error or ("the command was stopped" if hurried() else "it takes long")
        lacking = ", ".join([*delivery.lacks, *also])
        notice(
            f"not everything is in MLflow yet ({why}){lacking and f'; it lacks {lacking}'}. "
            f"{_kept(folder)}: {_sync(folder)}"
        )
    return delivery.done


def _kept(folder: RunFolder) -> str:
    """Return what to know before a run is synced."""
    if disk.is_full(folder.path):
        return "The disk is full, and the end of the run may be lost. Make room, then"
    # A study's end comes from its leader, which may still work.
    is_open = folder.is_elsewhere or run_locks.writer_lives(folder)
    if lookup.last_end(folder) is None and not is_open:
        return "The end of the run is not on this disk. To deliver the rest"
    return "Nothing is lost on this disk"


def print_delivery(
    folder: RunFolder, *, offline: bool, hurried: Callable[[], bool] | None = None
) -> None:
    """Wait for the delivery of a search, a comparison or a repeat; print what it lacks.

    Without `hurried`, Ctrl-C and other signals end the wait, and not the command. Main thread only.
    """
    if hurried is None:
        with SignalForwarder() as signals:
            print_delivery(folder, offline=offline, hurried=lambda: bool(signals.received))
        return
    if offline:
        delivery_status.wait_for_recorder(folder, hurried)
        print_note(offline_note(folder))
    else:
        wait(folder, print_note, hurried)
    if unsent := notification.problem(folder, hurried):
        print_note(unsent)


def print_note(text: str) -> None:
    """Print a note."""
    print_line(f"note: {text}")


def exit_code(folder: RunFolder) -> int:
    """Return the exit code of a command with a finished run, by what the user asked to wait for."""
    unlogged = any(one.late_model.exists() for one in (folder, *folder.children))
    complete = delivery_status.combined_status(folder).done and not unlogged
    return FINISHED if complete or not patience().required else NOT_DELIVERED


def offline_note(folder: RunFolder) -> str:
    """Return where an offline run is and how to deliver it."""
    path = folder.path
    is_below = path.is_absolute() and path.is_relative_to(Path.cwd())
    where = os.path.relpath(path) if is_below else path
    return f"offline: the run is in {where}; deliver it with: {_sync(folder)}"


def _sync(folder: RunFolder) -> str:
    return command_lines.line(folder.root, "sync", folder.path.name)

"""What a command prints at its end about its delivery to MLflow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankzero.errors import FINISHED, NOT_DELIVERED
from rankzero.mlflow_store.patience import patience
from rankzero.reporting.delivery_problems import UNDELIVERED
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.delivery_status import Delivery, combined_status


def lines(
    delivery: Delivery, name: str, why: str = "it takes long", also: Sequence[str] = ()
) -> Iterator[str]:
    """Yield what went wrong and what is still to come; nothing if all is delivered.

    `why`: why nobody waited longer, if MLflow reported no error. `also`: what else MLflow lacks.
    """
    for line in delivery.trouble:
        if delivery.done or not line.startswith(UNDELIVERED):
            yield line
    if not delivery.done:
        lacking = ", ".join([*delivery.lacks, *also])
        yield (
            f"not everything is in MLflow yet ({delivery.error or why})"
            f"{lacking and f'; it lacks {lacking}'}. Nothing is lost on this disk: "
            f"rankzero sync {name}"
        )


def exit_code(folder: RunFolder) -> int:
    """Return the exit code of a command with a finished run, by what the user asked to wait for."""
    unlogged = any(one.late_model.exists() for one in (folder, *folder.children))
    complete = combined_status(folder).done and not unlogged
    return FINISHED if complete or not patience().required else NOT_DELIVERED


def offline(folder: RunFolder) -> str:
    """Return where an offline run is and how to deliver it."""
    path, name = folder.path, folder.path.name
    where = (
        os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path
    )
    return f"offline: the run is in {where}; deliver it with: rankzero sync {name}"

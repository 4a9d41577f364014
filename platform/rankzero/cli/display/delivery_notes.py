"""What the end of a command says of its delivery to MLflow: what went wrong, and what is still to come."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankzero.reporting.delivery_problems import UNDELIVERED
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.delivery_status import Delivery


def lines(
    delivery: Delivery, name: str, why: str = "it takes long", also: Sequence[str] = ()
) -> Iterator[str]:
    """Yield what to say; nothing where MLflow has everything and all went well.

    `why`: what was not waited for, where MLflow gave no error. `also`: what it lacks besides.
    """
    yield from (
        line for line in delivery.trouble if delivery.done or not line.startswith(UNDELIVERED)
    )
    if not delivery.done:
        lacking = ", ".join([*delivery.lacks, *also])
        yield (
            f"not everything is in MLflow yet ({delivery.error or why}){lacking and f'; it lacks {lacking}'}. "
            f"Nothing is lost: rankzero sync {name}"
        )


def offline(folder: RunFolder) -> str:
    """Return where an offline run is and how to deliver it."""
    path, name = folder.path, folder.path.name
    where = (
        os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path
    )
    return f"offline: the run is in {where}; deliver it with: rankzero sync {name}"

"""The run's page told once more, where what came after its end had troubles that it does not tell."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

from rankzero.events import RunEnded
from rankzero.mlflow_store import limits
from rankzero.mlflow_store.items import DESCRIPTION, Tags
from rankzero.reporting.delivery_problems import trouble
from rankzero.reporting.run_page import written
from rankzero.run_store.delivery_state import DeliveryState
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.translate import trouble_of

if TYPE_CHECKING:
    from rankzero.mlflow_store.client import MlflowRuns, OpenRun

log = logging.getLogger("rankzero.recorder")


def description(folder: RunFolder, progress: DeliveryState, end: RunEnded | None = None) -> str:
    """Return what the run's page is to say, and remember in `progress` that it does."""
    try:
        page = written(folder, progress, end)
    except Exception as error:  # whatever a user's values do to the report, the run gets its end
        log.exception("no report")
        page = f"The report could not be written: {error!r}"
    progress.page, progress.told = (
        _digest(limits.head(page, limits.TAG_LENGTH)),
        _digest(*trouble(progress)),
    )
    return page


def retold(
    tracker: MlflowRuns, run: OpenRun, folder: RunFolder, progress: DeliveryState
) -> list[Tags]:
    """Return what brings the page up to date, if the delivery had more troubles; of a page that is a user's, not it."""
    progress.error = None  # the latest try is this one
    if progress.told == _digest(*trouble(progress)):
        return []
    is_ours = _digest(tracker.description(run.run_id)) == progress.page
    page = {DESCRIPTION: description(folder, progress)} if is_ours else {}
    return [Tags(trouble_of(progress) | page)]


def _digest(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()

"""The run's description in MLflow: its text, and its update if problems follow the run's end."""

from __future__ import annotations

import dataclasses
import hashlib
import logging

from rankzero.events import RunEnded
from rankzero.mlflow_store import limits
from rankzero.mlflow_store.items import DESCRIPTION, Tags
from rankzero.reporting.delivery_problems import trouble
from rankzero.reporting.run_page import written
from rankzero.run_store.delivery_state import DeliveryState, Page
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.open_run import Target
from rankzero.tracking.translate import problem_tags

log = logging.getLogger("rankzero.recorder")


def describe(
    folder: RunFolder, state: DeliveryState, end: RunEnded | None = None
) -> tuple[str, DeliveryState]:
    """Return the text of the run's page, and the state that remembers it."""
    try:
        text = written(folder, state, end)
    except Exception as error:
        # A user's values may break the report in any way, and the run must still get its end.
        log.exception("no report")
        text = f"The report could not be written: {error!r}"
    page = Page(_digest(limits.head(text, limits.TAG_LENGTH)), _digest(*trouble(state)))
    return text, dataclasses.replace(state, page=page)


def update_page(
    target: Target, folder: RunFolder, state: DeliveryState
) -> tuple[list[Tags], DeliveryState]:
    """Return the tags that add problems since the run's end to its page, and the state after that.

    A page that a user has rewritten stays theirs: only the tags about problems change.
    """
    # This request is the latest, and no earlier one's error is to be on the page.
    state = dataclasses.replace(state, retries=dataclasses.replace(state.retries, error=None))
    if state.page.told == _digest(*trouble(state)):
        return [], state
    if _digest(target.store.description(target.run.run_id)) != state.page.page:
        return [Tags(problem_tags(state))], state
    text, state = describe(folder, state)
    return [Tags({**problem_tags(state), DESCRIPTION: text})], state


def _digest(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()

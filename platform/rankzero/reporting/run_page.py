"""The text of a run's page in MLflow, from the run's folder."""

from __future__ import annotations

from rankzero.catalog.summary import read_summary
from rankzero.reporting import run_report
from rankzero.reporting.delivery_problems import trouble
from rankzero.reporting.run_facts import fold
from rankzero.run_store.delivery_state import DeliveryState, load, path_of
from rankzero.run_store.folder import RunFolder


def page(folder: RunFolder) -> str:
    """Return the Markdown of the page, as if a run without an end ended now."""
    return written(folder, load(path_of(folder, 0)))


def written(folder: RunFolder, progress: DeliveryState) -> str:
    """Return the page with the problems of this delivery."""
    facts = fold(folder.all_events())
    if folder.description.exists():
        return run_report.with_notes(
            folder.description.read_text(encoding="utf-8"), facts.notices, trouble(progress)
        )
    end = facts.end or run_report.so_far(facts, read_summary(folder).status)
    return run_report.markdown(folder.identity.name, facts, end, trouble(progress))

"""What a run's page in MLflow says, from its folder."""

from __future__ import annotations

from rankzero.tracking import progress, report
from rankzero.tracking.facts import fold
from rankzero.tracking.folder import RunFolder
from rankzero.tracking.summary import read_summary
from rankzero.tracking.trouble import trouble


def page(folder: RunFolder) -> str:
    """Return the Markdown of the run's description in MLflow, or what it would be if the run ended now."""
    if folder.description.exists():
        return folder.description.read_text()
    facts = fold(folder.all_events())
    end = facts.end or report.so_far(facts, status(folder))
    return report.markdown(folder.identity.name, facts, end, trouble(progress.load(progress.path_of(folder, 0))))


def status(folder: RunFolder) -> str:
    """Return the run's status: FINISHED, FAILED, KILLED, STARTING, RUNNING or DIED. Raises BrokenRun."""
    return read_summary(folder).status

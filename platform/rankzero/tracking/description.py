"""The run's description in MLflow: what users write, and the run's page below it."""

from __future__ import annotations

import dataclasses
import hashlib
import re

from rankzero.mlflow_store import limits
from rankzero.mlflow_store.items import DESCRIPTION, Tags
from rankzero.reporting import page_links
from rankzero.reporting.delivery_problems import trouble
from rankzero.reporting.run_facts import facts_of
from rankzero.reporting.run_report import written
from rankzero.run_store.delivery_state import DeliveryState, Page, Task
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.open_run import Target
from rankzero.tracking.retry import log
from rankzero.tracking.translate import problem_tags

# MLflow shows the description as Markdown, and a comment is invisible there.
_MARKER = "<!-- rankzero {}: notes above this line stay, RankZero replaces what is below it -->"
_MARKED = re.compile(r"^<!-- rankzero ([0-9a-f]{16}): .*-->\s*", re.MULTILINE)
# A page as versions without a marker wrote it: its first heading, and its last section.
_EARLIER = re.compile(
    r"### (?:FINISHED|FAILED|KILLED): .*\n"
    r"### (?:Setting\s+\| Setting \| Value \|(?:\n\|[^\n]*)+|Reproduce\s+```sh\n[^`]*\n```)\s*",
    re.DOTALL,
)
# Below this room a page says nothing, so long notes of a user stand alone.
_LEAST_PAGE = 500


def page_tags(
    task: Task, target: Target, folder: RunFolder, state: DeliveryState
) -> tuple[list[Tags], DeliveryState]:
    """Return the tags that bring the run's page up to date, and the state after that.

    Task.PAGE writes the page at the end of an attempt. Task.PAGE_UPDATE adds the problems since
    then, and links to what was uploaded since then. If a user has changed or removed the page, an
    update changes only the tags about problems.
    """
    # This request is the latest, and no earlier one's error is to be on the page.
    state = dataclasses.replace(state, retries=dataclasses.replace(state.retries, error=None))
    told = _digest(*trouble(state), *page_links.linked(state))
    if task is Task.PAGE_UPDATE and state.page.told == told:
        return [], state
    description = target.store.description(target.run.run_id)
    # Without a checksum on this disk, the text alone shows what an earlier version wrote.
    if state.page == Page() and _EARLIER.fullmatch(description.replace("\r\n", "\n")):
        description = ""
    notes, is_ours = split(description, state.page.page)
    if task is Task.PAGE_UPDATE and not is_ours:
        return [Tags(problem_tags(state))], state
    try:
        text = written(folder, facts_of(folder), state)
    except Exception as error:
        # A user's values may break the report in any way.
        log.exception("no report")
        text = f"The report could not be written: {error!r}"
    description, state = join(notes, text), dataclasses.replace(state, page=Page(told=told))
    return [Tags({**problem_tags(state), DESCRIPTION: description})], state


def split(description: str, unmarked: str = "") -> tuple[str, bool]:
    """Return what users wrote in a description, and whether the rest is a page as we wrote it.

    A page that a user has edited is the user's, too. `unmarked` is the checksum of a page that an
    earlier version wrote: without a marker, in place of the whole description.
    """
    if unmarked and unmarked == _digest(description):
        return "", True
    for marker in _MARKED.finditer(description):
        above, below = description[: marker.start()], description[marker.end() :]
        # The checksum is in the marker, because delivery.json may be lost or on another machine.
        if _page_digest(below) == marker[1]:
            return _MARKED.sub("", above).rstrip(), True
    return _MARKED.sub("", description).rstrip(), False


def join(notes: str, page: str) -> str:
    """Return the description of these notes and, if there is room for it, the page below them."""
    parts = [*([notes] if notes else []), _MARKER.format("0" * 16), ""]
    room = limits.TAG_LENGTH - len("\n\n".join(parts))
    if room < _LEAST_PAGE:
        return notes
    page = limits.head(page, room)
    return "\n\n".join([*parts[:-2], _MARKER.format(_page_digest(page)), page])


def moved(description: str, experiment_id: str, run_id: str) -> str:
    """Return a description whose page links to this run. Users' words stay."""
    notes, is_ours = split(description)
    if not is_ours:
        return description
    [*_, marker] = _MARKED.finditer(description)
    page = description[marker.end() :]
    return join(notes, page_links.readdressed(page, experiment_id, run_id))


def _page_digest(page: str) -> str:
    # An editor may change the space at the ends of lines.
    return _digest(" ".join(page.split()))[:16]


def _digest(*lines: str) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()

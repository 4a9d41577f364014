"""Links on the run's page in MLflow to its pictures, charts and pages: one click each.

MLflow cannot show an image there in a smaller size, and a wide one hides the rest. A link contains
the run's id, so a run in another store needs other links.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from urllib.parse import quote

from rankzero.run_store.delivery_state import DeliveryState

_SHOWN = re.compile(r"artifacts/(?:(?:pictures/)?[^/]+\.png|[^/]+\.html)")
_MOST = 8
_RUN = re.compile(r"(?<=\]\()#/experiments/\d+/runs/[0-9a-f]{32}/")


def linked(state: DeliveryState) -> list[str]:
    """Return the artifacts to which the page links: those that MLflow has now."""
    found = [name for name in state.queue.uploaded if _SHOWN.fullmatch(name)]
    # Pages of HTML first: they contain the charts.
    found.sort(key=lambda name: (name.endswith(".png"), name))
    return [name.removeprefix("artifacts/") for name in found[:_MOST]]


def links(state: DeliveryState) -> str:
    """Return links as Markdown, to follow the line that MLflow shows without a click."""
    base = f"{_address(state.experiment_id, state.run_id)}artifacts/"
    # Without its kind of workflow, MLflow shows the menu of its other half.
    end = "?workflowType=machine_learning"
    return "".join(f" · [{_words(name)}]({base}{quote(name)}{end})" for name in linked(state))


def readdressed(text: str, experiment_id: str, run_id: str) -> str:
    """Return the page with links to this run in place of another one."""
    return _RUN.sub(_address(experiment_id, run_id), text)


def _address(experiment_id: str | None, run_id: str | None) -> str:
    return f"#/experiments/{experiment_id}/runs/{run_id}/"


def _words(name: str) -> str:
    """Return a file's name as words that Markdown leaves as they are."""
    path = PurePosixPath(name)
    return " ".join(re.findall(r"\w+", path.stem.replace("_", " "))) or path.suffix[1:]

"""What the adapters recorded, as the frameworks' tests read it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rankzero.catalog.lookup import mlflow_id
from rankzero.events import Evaluated, ParamsLogged, RunEnded, RunStarted, StepsLogged
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.tracking.sync import deliver

SECONDS = 300  # on a busy machine, whose courier waits for idle time


class Recorded(NamedTuple):
    """A run's params; its metrics and texts by step."""

    params: dict[str, Any]
    rows: dict[int, dict[str, float | str]]


def read(folder: Path) -> Recorded:
    """Read a run's folder."""
    params: dict[str, Any] = {}
    rows: dict[int, dict[str, float | str]] = {}
    for event in read_all(RunFolder(folder).events):
        if isinstance(event, (RunStarted, ParamsLogged)):
            params |= {name: yaml.safe_load(text) for name, text in event.params.items()}
        elif isinstance(event, StepsLogged):
            for name, values in event.metrics.items():
                for step, value in zip(event.steps, values, strict=True):
                    rows.setdefault(step, {})[name] = value
        elif isinstance(event, Evaluated):
            rows.setdefault(event.step, {}).update(event.metrics)
    for path in folder.glob("artifacts/text/*/step_*.md"):
        step = int(path.stem.removeprefix("step_"))
        rows.setdefault(step, {})[path.parent.name] = path.read_text(encoding="utf-8")
    return Recorded(params, dict(sorted(rows.items())))


def steps(folder: Path, metric: str) -> list[int]:
    """Return the steps at which a run logged a metric, in this order."""
    logged = [
        event for event in read_all(RunFolder(folder).events) if isinstance(event, StepsLogged)
    ]
    return [step for event in logged if metric in event.metrics for step in event.steps]


def ends(folder: Path) -> list[tuple[str, str]]:
    """Return the statuses and reasons with which a run's attempts ended."""
    events = read_all(RunFolder(folder).events)
    return [(event.status, event.reason) for event in events if isinstance(event, RunEnded)]


def id_in_mlflow(folder: Path) -> str:
    """Return a run's id in MLflow, once its courier has created it there."""
    end = time.monotonic() + SECONDS
    while (found := mlflow_id(RunFolder(folder))) is None:
        assert time.monotonic() < end, f"MLflow has no {folder.name} after {SECONDS} s"
        time.sleep(0.1)
    return found


def deliver_rest(folder: Path) -> None:
    """Return once MLflow has all of a run that has ended."""
    assert deliver(RunFolder(folder), patience=SECONDS).done

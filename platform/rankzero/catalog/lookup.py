"""The runs on this disk: found by name or by MLflow id, listed without reading again those that have ended.

What a list needs of a run that has ended is kept in ``runs/.summaries.jsonl``: a line for each, with sizes and times of
the files that it was taken from. The file may go at any time: it is made again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rankzero.catalog import summary
from rankzero.catalog.summary import Summary
from rankzero.config.renamed import params_with_new_names
from rankzero.errors import UserError
from rankzero.events import Evaluated, RunEnded, RunStarted
from rankzero.experiment import Goal
from rankzero.run_store import delivery_state as delivery
from rankzero.run_store import names, symlinks
from rankzero.run_store.folder import EVENTS, RunFolder
from rankzero.run_store.journal import read, read_all

CACHE = ".summaries.jsonl"
IDENTITY, SAMPLES, DELIVERY = "run.json", "system-node_0.jsonl", "delivery.json"
log = logging.getLogger(__name__)
SPARE_LINES = 1000  # outdated ones, before the cache is begun anew


def folders(runs: Path) -> list[RunFolder]:
    """Return every run's folder."""
    with contextlib.suppress(FileNotFoundError), os.scandir(runs) as entries:
        return [
            RunFolder(Path(entry.path))
            for entry in entries
            if os.path.exists(f"{entry.path}/{IDENTITY}")  # noqa: PTH110
        ]
    return []


def find(runs: Path, name_or_id: str) -> RunFolder | None:
    """Return the folder of the run with this name or MLflow run id; None where it is not on this disk.

    Raises BrokenRun where links lie in it.
    """
    if not names.is_plain(name_or_id):
        return None
    by_name = RunFolder(runs / name_or_id)
    if (by_name.path / IDENTITY).exists():
        found: RunFolder | None = by_name
    else:
        found = next((one.folder for one in listed(runs) if one.mlflow_run_id == name_or_id), None)
    if found is not None:
        symlinks.refuse(found.path)
    return found


def require(runs: Path, name_or_id: str) -> RunFolder:
    """Return the run's folder. Raises UserError, naming the newest runs, where there is none."""
    found = find(runs, name_or_id)
    if found is None:
        newest = [one.name for one in listed(runs)[:3]]
        known = f"the newest are {', '.join(newest)}" if newest else f"there are no runs in {runs}"
        raise UserError(f"no run is called {names.shown(name_or_id)}; {known}")
    return found


def mlflow_id(folder: RunFolder) -> str | None:
    """Return the run's id in MLflow, once it is there."""
    with contextlib.suppress(names.InvalidRunFolder):
        return delivery.load(delivery.path_of(folder, 0)).run_id or folder.identity.mlflow_run_id
    return None


def last_end(folder: RunFolder) -> RunEnded | None:
    """Return how the newest attempt ended; None where it runs, or did not say."""
    return summary.last_end(summary.tail(folder.events))


def journal_bytes(folder: RunFolder) -> int | None:
    """Return how much the run's journal holds; None where there is none."""
    with contextlib.suppress(OSError):
        return folder.events.stat().st_size
    return None


def attempt_started(folder: RunFolder, since: int | None) -> bool:
    """Tell whether an attempt has begun, or was said to have ended, since `journal_bytes` were so many."""
    if since is None:
        return folder.events.exists()
    return any(isinstance(event, (RunStarted, RunEnded)) for event in read(folder.events, since)[0])


def listed(runs: Path, told: Callable[[str], object] = log.debug) -> list[Summary]:
    """Return all runs, the newest first; `told` hears of folders that cannot be read as a run's, and why."""
    known, lines = _cached(runs / CACHE)
    found, new = [], []
    for folder in folders(runs):
        signature = _signature(folder)
        kept = known.get(folder.path.name)
        if kept is not None and kept[0] == signature:
            found.append(Summary(folder=folder, **kept[1]))
            continue
        try:
            made = summary.read_summary(folder)
        except names.InvalidRunFolder as error:
            told(str(error))
            continue
        found.append(made)
        new += [(folder.path.name, signature, made)] if made.ended else []
    _keep(runs / CACHE, new, anew=lines > len(found) + SPARE_LINES)
    return sorted(found, key=lambda one: -one.started)


def best_so_far(folder: RunFolder, goal: Goal) -> float | None:
    """Return the best value of the goal's metric that the run's earlier attempts reached."""
    best: float | None = None
    for event in read_all(folder.events):
        value = event.metrics.get(goal.metric) if isinstance(event, Evaluated) else None
        if value is not None and goal.better(value, best):
            best = value
    return best


Signature = list[list[int]]


def _signature(folder: RunFolder) -> Signature:
    """Return what changes whenever the run's summary does."""
    return [_stamp(f"{folder.path}/{name}") for name in (IDENTITY, EVENTS, SAMPLES, DELIVERY)]


def _stamp(path: str) -> list[int]:
    try:
        stat = os.stat(path)  # noqa: PTH116 - thousands of them
    except OSError:
        return []
    return [stat.st_size, stat.st_mtime_ns]


def _cached(path: Path) -> tuple[dict[str, tuple[Signature, dict[str, Any]]], int]:
    """Return the summaries that are kept, by the folder's name, and how many lines they take."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}, 0
    known = {}
    for line in lines:
        with contextlib.suppress(
            ValueError, TypeError, RecursionError, AttributeError
        ):  # torn, of another version, not ours
            name, signature, fields = json.loads(line)
            if summary.are_sound(fields):
                params = params_with_new_names(fields["params"])
                known[name] = (signature, {**fields, "params": params})
    return known, len(lines)


def _keep(path: Path, new: Sequence[tuple[str, Signature, Summary]], *, anew: bool) -> None:
    """Append to the cache; on a disk that cannot be written to, the next list reads the journals again."""
    lines = [
        json.dumps([name, signature, one.fields()], separators=(",", ":")) + "\n"
        for name, signature, one in new
    ]
    with contextlib.suppress(OSError):
        if anew:
            path.unlink()
        elif lines:
            with open(path, "a", encoding="utf-8", opener=symlinks.no_follow) as file:
                file.write("".join(lines))

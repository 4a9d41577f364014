"""Run folders and events for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rankzero.events import (
    CheckpointDeleted,
    CheckpointSaved,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    StepsLogged,
)
from rankzero.run_store import run_locks
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import Journal, read_all

E = TypeVar("E")
T0 = 1_800_000_000.0
PARAMS = {"lr": "0.1", "goal.metric": "val/accuracy", "goal.mode": "max", "goal.target": "0.5"}


def settle(folder: RunFolder, seconds: float = 1000.0) -> None:
    """Make a run so old that a list keeps its summary."""
    for path in (folder.events, folder.path):
        os.utime(path, (time.time() - seconds,) * 2)


def make_folder(root: Path, uri: str = "sqlite:////nowhere/tests.db", **changes: Any) -> RunFolder:
    identity = Identity(f"run-{uuid.uuid4().hex[:6]}", uuid.uuid4().hex, "tests", uri)
    return RunFolder.create(root / "runs", dataclasses.replace(identity, **changes))


def append(folder: RunFolder, *events: Event, node: int | None = None) -> None:
    """Append events to the run's journal, or to the one of a node's samples."""
    journal = Journal(folder.events if node is None else folder.system(node))
    for event in events:
        journal(event)
    journal.close()


def started(attempt: int = 1, step: int = 0, **params: str) -> RunStarted:
    return RunStarted(T0 + step, {**PARAMS, **params}, {"host": "here"}, attempt, step, 100)


def steps(first: int, last: int, key: str = "train/loss", offset: float = 0.0) -> StepsLogged:
    numbers = list(range(first, last + 1))
    return StepsLogged(
        numbers, [T0 + n for n in numbers], {key: [1.0 / n + offset for n in numbers]}
    )


def evaluated(step: int, accuracy: float, best: bool = True) -> Evaluated:
    return Evaluated(T0 + step, step, {"val/accuracy": accuracy, "val/loss": 1 - accuracy}, best)


def saved(folder: RunFolder, step: int, best: bool = True, size: int = 1000) -> CheckpointSaved:
    path = folder.checkpoints / f"step_{step:08d}"
    (path / "ranks").mkdir(parents=True)
    (path / "state.pt").write_bytes(bytes(size))
    (path / "ranks" / "0.json").write_text("{}")
    return CheckpointSaved(
        T0 + step + 0.5,
        step,
        str(path.relative_to(folder.path)),
        best,
        {"val/accuracy": step / 100, "val/loss": 1 - step / 100},
    )


def deleted(step: int) -> CheckpointDeleted:
    return CheckpointDeleted(T0 + step + 0.7, step, f"checkpoints/step_{step:08d}")


def ended(
    status: Any = "FINISHED",
    reason: str = "trained",
    error: str | None = None,
    metrics: dict[str, float] | None = None,
    at: float = T0 + 100,
) -> RunEnded:
    return RunEnded(at, status, reason, error, metrics or {})


def of_kind(folder: Path | None, kind: type[E]) -> list[E]:
    """Return the events of one kind in the journal of a run's folder."""
    assert folder is not None
    return [event for event in read_all(folder / "events.jsonl") if isinstance(event, kind)]


def keys(points: Sequence[Any]) -> set[str]:
    return {point.key for point in points}


@contextlib.contextmanager
def stuck(root: Path) -> Iterator[RunFolder]:
    """A run that has finished, and whose recorder lives and gets nowhere."""
    made = make_folder(root)
    append(made, started(), ended())
    with run_locks.lock(made, 0) as held:
        assert held
        yield made

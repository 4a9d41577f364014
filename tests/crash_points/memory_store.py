"""MLflow in memory: what the courier needs of `MlflowRuns`, with the same results.

`test_memory_store.py` compares it with the real client. Each call that changes something is first
appended to a log file, if one is given. So the log of a recorded run has MLflow's state after each
call. That state survives a power cut, because the server is another machine.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rankzero.events import CheckpointSaved, DataDescribed, RunEnded, RunStarted
from rankzero.mlflow_store.items import DESCRIPTION, MetricPoint
from rankzero.mlflow_store.uris import RunGone
from rankzero.run_store.folder import Identity

RUN_ID = "run-1"


class OpenRun(NamedTuple):
    """As `mlflow_store.client.records.OpenRun`, whose import costs the seconds of mlflow's."""

    run_id: str
    experiment_id: str
    marks: dict[str, int]


Change = tuple[str, tuple[Any, ...]]


class MemoryStore:
    """One run. The courier of one run calls it, from one thread."""

    def __init__(self, log: Path | None = None) -> None:
        self.uuid: str | None = None
        self.status: str | None = None
        self.points: dict[str, dict[int, set[tuple[int, float]]]] = {}
        """Metric -> step -> its values with their times in ms. More than one is a violation."""
        self.tags: dict[str, str] = {}
        self.params: dict[str, str] = {}
        self.checkpoints: dict[int, tuple[str, bool]] = {}
        """Step -> when it was saved, and whether it is the best."""
        self.artifacts: set[str] = set()
        self.models = self
        self._log = log
        if log is not None:
            self.replay(read_changes(log))

    def replay(self, changes: Iterable[Change]) -> None:
        """Apply what an earlier store logged."""
        for name, arguments in changes:
            getattr(self, f"_{name}")(*arguments)

    def open_run(self, identity: Identity, start_seconds: float) -> OpenRun | None:
        if self.uuid != identity.uuid:
            assert self.uuid is None, "a second run"
            self._change("create", identity.uuid)
        return self.find_open_run(identity)

    def find_open_run(self, identity: Identity) -> OpenRun | None:
        marks = {key: max(steps) for key, steps in self.points.items()}
        return OpenRun(RUN_ID, "1", marks) if self.uuid == identity.uuid else None

    def start_attempt(self, run_id: str, event: RunStarted) -> None:
        self._change("start", event)

    def log_data(self, run_id: str, event: DataDescribed) -> None:
        """Data sets are not part of the model."""

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        self._change("add", [tuple(point) for point in points])

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._change("tag", dict(tags))

    def description(self, run_id: str) -> str:
        return self.tags.get(DESCRIPTION, "")

    def close_run(self, run_id: str, event: RunEnded) -> None:
        self._change("close", event.status)

    def require_run(self, run_id: str) -> None:
        if self.uuid is None:
            raise RunGone("the MLflow run was deleted")

    def log_artifact(self, run_id: str, path: Path, folder: str | None = None) -> None:
        self._change("upload", f"{folder}/{path.name}" if folder else path.name)

    def save_checkpoint(
        self,
        run: object,
        event: CheckpointSaved,
        folder: Path,
        points: Callable[[str], Sequence[MetricPoint]],
    ) -> str:
        name = f"model-{event.step}"
        is_new = self.checkpoints.get(event.step, ("", False))[0] != repr(event.time)
        if is_new and not any(folder.glob("*")):
            raise FileNotFoundError(folder)
        linked = [tuple(point) for point in points(name)] if is_new else []
        self._change("save", event.step, repr(event.time), event.best, linked)
        return name

    def delete_checkpoints(self, run: object, step: int) -> None:
        self._change("delete", step)

    def history(self, run_id: str, key: str) -> list[MetricPoint]:
        steps = sorted(self.points.get(key, {}).items())
        return [
            MetricPoint(key, value, at, step) for step, seen in steps for at, value in sorted(seen)
        ]

    def _change(self, name: str, *arguments: Any) -> None:
        if self._log is not None:
            with self._log.open("ab", buffering=0) as file:
                file.write(pickle.dumps((name, arguments)))
        getattr(self, f"_{name}")(*arguments)

    def _create(self, uuid: str) -> None:
        self.uuid, self.status = uuid, "RUNNING"

    def _start(self, event: RunStarted) -> None:
        self.status = "RUNNING"
        self.params = {**event.params, **self.params}
        self.tags |= {**event.environment, "rankzero.attempt": str(event.attempt)}

    def _add(self, points: Sequence[tuple[Any, ...]]) -> None:
        for key, value, milliseconds, step, _ in points:
            # The store's primary key: a copy of a point changes nothing.
            self.points.setdefault(key, {}).setdefault(step, set()).add((milliseconds, value))

    def _tag(self, tags: Mapping[str, str]) -> None:
        self.tags |= tags

    def _close(self, status: str) -> None:
        self.status = status

    def _upload(self, name: str) -> None:
        self.artifacts.add(name)

    def _save(self, step: int, at: str, best: bool, points: Sequence[tuple[Any, ...]]) -> None:
        if best:
            self.checkpoints = {
                other: (when, False) for other, (when, _) in self.checkpoints.items()
            }
        self.checkpoints[step] = at, best
        self._add(points)

    def _delete(self, step: int) -> None:
        self.checkpoints.pop(step, None)


def read_changes(log: Path) -> list[Change]:
    """Return the changes that a store has logged so far."""
    changes: list[Change] = []
    if log.exists():
        with log.open("rb") as file:
            while file.peek(1):
                changes.append(pickle.load(file))
    return changes

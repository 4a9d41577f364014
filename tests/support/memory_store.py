"""MLflow in memory: what the courier needs of `MlflowRuns`, with the same results.

`crash_points/test_memory_store.py` compares it with the real client. Each call that changes
something is first appended to a log file, if one is given. So the log of a recorded run has
MLflow's state after each call. That state survives a power cut, because the server is another
machine.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rankzero.events import CheckpointSaved, DataDescribed, RunEnded, RunStarted
from rankzero.mlflow_store.items import CLAIM, DESCRIPTION, MetricPoint, claim_of
from rankzero.mlflow_store.uris import RunGone
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.tracking.deliverer import Deliverer

RUN_ID = "run-1"


class Refused(Exception):
    """As MLflow's exception for what it will never take."""

    error_code = "INVALID_PARAMETER_VALUE"


class OpenedRun(NamedTuple):
    """As `mlflow_store.client.RunRecord`, whose import costs the seconds of mlflow's."""

    run_id: str
    experiment_id: str
    marks: dict[str, int]
    tags: dict[str, str]


Change = tuple[str, tuple[Any, ...]]


class MemoryStore:
    """One run. The courier of one run calls it, from one thread.

    `fail` is called before each request with its name and argument, and may raise.
    """

    def __init__(self, log: Path | None = None) -> None:
        self.uuid: str | None = None
        self.status: str | None = None
        self.points: dict[str, dict[int, set[tuple[int, float]]]] = {}
        """Metric -> step -> its values with their times in ms. More than one is a violation."""
        self.tags: dict[str, str] = {}
        self.params: dict[str, str] = {}
        self.checkpoints: dict[int, tuple[str, bool]] = {}
        """Step -> when it was saved, and whether it is the best."""
        self.artifacts: dict[str, str] = {}
        self.pictures: dict[tuple[str, int, int], bytes] = {}
        self.calls: list[str] = []
        """Requests that did not fail."""
        self.sent: list[MetricPoint] = []
        """Points in the order of their arrival, the copies included."""
        self.gone = False
        self.fail: Callable[[str, object], object] | None = None
        self.models = self
        self._log = log
        if log is not None:
            self.replay(read_changes(log))

    def replay(self, changes: Iterable[Change]) -> None:
        """Apply what an earlier store logged."""
        for name, arguments in changes:
            getattr(self, f"_{name}")(*arguments)

    def curve(self, key: str) -> dict[int, float]:
        """Return {step: value} of a metric, as MLflow would chart it."""
        return {step: min(seen)[1] for step, seen in self.points.get(key, {}).items()}

    def open_run(
        self, identity: Identity, start_seconds: float, experiment_id: str | None = None
    ) -> OpenedRun | None:
        self._call("open_run", identity)
        if self.uuid != identity.uuid:
            assert self.uuid is None, "a second run"
            self._change("create", identity.uuid)
        return self.find_open_run(identity)

    def find_open_run(
        self, identity: Identity, experiment_id: str | None = None
    ) -> OpenedRun | None:
        marks = {key: max(steps) for key, steps in self.points.items()}
        found = OpenedRun(RUN_ID, "1", marks, dict(self.tags))
        return found if self.uuid == identity.uuid else None

    def start_attempt(self, run_id: str, event: RunStarted) -> None:
        self._call("start_attempt", event)
        self._change("start", event)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        self._call("log_params", params)
        self._change("param", dict(params))

    def log_data(self, run_id: str, event: DataDescribed) -> None:
        # Data sets are not part of the model.
        self._call("log_data", event)

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        self._call("log_metrics", points)
        self.sent += points
        self._change("add", [tuple(point) for point in points])

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._call("set_tags", tags)
        self._change("tag", dict(tags))

    def description(self, run_id: str) -> str:
        self._call("description", run_id)
        return self.tags.get(DESCRIPTION, "")

    def close_run(self, run_id: str, event: RunEnded) -> None:
        self._call("close_run", event)
        self._change("close", event.status)

    def require_run(self, run_id: str) -> None:
        self._call("require_run", run_id)
        if self.gone or self.uuid is None:
            raise RunGone(f"the MLflow run {RUN_ID} was deleted")

    def log_artifact(self, run_id: str, path: Path, folder: str | None = None) -> None:
        self._call("log_artifact", path)
        name = f"{folder}/{path.name}" if folder else path.name
        self._change("upload", name, path.read_text(errors="replace"))

    def log_pictures(
        self, run_id: str, pictures: Mapping[str, Path], step: int, milliseconds: int
    ) -> list[str]:
        # No recorded run has pictures.
        self._call("log_pictures", pictures)
        for key, path in pictures.items():
            self.pictures[key, step, milliseconds] = path.read_bytes()
        return [f"pictures/{key}.png" for key in pictures]

    def save_checkpoint(
        self,
        run: object,
        event: CheckpointSaved,
        folder: Path,
        points: Callable[[str], Sequence[MetricPoint]],
    ) -> str:
        self._call("save_checkpoint", event)
        name = f"model-{event.step}"
        is_new = self.checkpoints.get(event.step, ("", False))[0] != repr(event.time)
        if is_new and not any(folder.glob("*")):
            raise FileNotFoundError(folder)
        linked = [tuple(point) for point in points(name)] if is_new else []
        self._change("save", event.step, repr(event.time), event.best, linked)
        return name

    def delete_checkpoints(self, run: object, step: int) -> None:
        self._call("delete_checkpoints", step)
        self._change("delete", step)

    def history(self, run_id: str, key: str) -> list[MetricPoint]:
        steps = sorted(self.points.get(key, {}).items())
        return [
            MetricPoint(key, value, at, step) for step, seen in steps for at, value in sorted(seen)
        ]

    def _call(self, name: str, argument: object) -> None:
        if self.fail is not None:
            self.fail(name, argument)
        self.calls.append(name)

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
        self.tags[CLAIM] = claim_of(event)

    def _add(self, points: Sequence[tuple[Any, ...]]) -> None:
        for key, value, milliseconds, step, _ in points:
            # The store's primary key: a copy of a point changes nothing.
            self.points.setdefault(key, {}).setdefault(step, set()).add((milliseconds, value))

    def _param(self, params: Mapping[str, str]) -> None:
        self.params = {**params, **self.params}

    def _tag(self, tags: Mapping[str, str]) -> None:
        self.tags |= tags

    def _close(self, status: str) -> None:
        self.status = status

    def _upload(self, name: str, text: str) -> None:
        self.artifacts[name] = text

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


def deliverer_to(store: MemoryStore, folder: RunFolder, node: int = 0) -> Deliverer:
    """Return what delivers a run to this store, in a hurry and without waits between retries."""
    made = Deliverer(folder, node, lambda uri: store, longest_wait=0.0)  # type: ignore[arg-type, return-value]
    made.hasten()
    return made


def delivered(folder: RunFolder, store: MemoryStore) -> Deliverer:
    """Deliver all of a run. Raises AssertionError where that has no end."""
    return deliver(deliverer_to(store, folder))


def deliver(deliverer: Deliverer, most: int = 10_000) -> Deliverer:
    """Deliver all that is there. Raises AssertionError where that has no end."""
    deliverer.hasten()
    for _ in range(most):
        if not deliverer.work() and deliverer.complete:
            return deliverer
    raise AssertionError(f"not complete after {most} tries: {deliverer.state}")

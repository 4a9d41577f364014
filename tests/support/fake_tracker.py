"""A tracking store in memory: what `Deliverer` needs of `MlflowRuns`, and failures on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rankzero.events import CheckpointSaved, DataDescribed, RunEnded, RunStarted
from rankzero.mlflow_store.items import MetricPoint
from rankzero.mlflow_store.uris import RunGone
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.tracking.deliverer import Deliverer


class Refused(Exception):
    """As MLflow's exception for what it will never take."""

    error_code = "INVALID_PARAMETER_VALUE"


class FakeTracker:
    """Keeps what it gets. `fail` is called before each write with its name and argument."""

    def __init__(self) -> None:
        self.points: list[MetricPoint] = []
        self.batches: list[int] = []
        self.tags: dict[str, str] = {}
        self.params: dict[str, str] = {}
        self.calls: list[str] = []
        self.artifacts: dict[str, str] = {}
        self.data: dict[str, DataDescribed] = {}
        self.pictures: dict[tuple[str, int, int], bytes] = {}
        self.checkpoints: dict[int, list[MetricPoint]] = {}
        self.status: str | None = None
        self.gone = False
        self.marks: dict[str, int] = {}
        self.models = self
        self.fail: Callable[[str, object], None] = lambda name, argument: None

    def open_run(self, identity: Identity, start_seconds: float) -> object:
        from rankzero.mlflow_store.client import OpenRun

        self._call("open_run", identity)
        self.status = self.status or "RUNNING"
        return OpenRun("run-1", "experiment-1", dict(self.marks))

    def find_open_run(self, identity: Identity) -> object | None:
        return None if self.status is None else self.open_run(identity, 0.0)

    def start_attempt(self, run_id: str, event: RunStarted) -> None:
        self._call("start_attempt", event)
        self.status = "RUNNING"
        self.params.update(event.params)

    def log_data(self, run_id: str, event: DataDescribed) -> None:
        self._call("log_data", event)
        self.data[event.context] = event

    def log_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        self._call("log_metrics", points)
        self.batches.append(len(points))
        self.points += points

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._call("set_tags", tags)
        self.tags.update(tags)

    def description(self, run_id: str) -> str:
        self._call("description", run_id)
        return self.tags.get("mlflow.note.content", "")

    def close_run(self, run_id: str, event: RunEnded) -> None:
        self._call("close_run", event)
        self.status = event.status

    def require_run(self, run_id: str) -> None:
        self._call("require_run", run_id)
        if self.gone:
            raise RunGone("the MLflow run run-1 was deleted")

    def log_artifact(self, run_id: str, path: Path, folder: str | None = None) -> None:
        self._call("log_artifact", path)
        self.artifacts[f"{folder}/{path.name}" if folder else path.name] = path.read_text(
            errors="replace"
        )

    def log_pictures(
        self, run_id: str, pictures: Mapping[str, Path], step: int, milliseconds: int
    ) -> None:
        self._call("log_pictures", pictures)
        self.pictures |= {
            (key, step, milliseconds): path.read_bytes() for key, path in pictures.items()
        }

    def save_checkpoint(
        self,
        run: object,
        event: CheckpointSaved,
        folder: Path,
        points: Callable[[str], Sequence[MetricPoint]],
    ) -> str:
        self._call("save_checkpoint", event)
        if not folder.is_dir():
            raise FileNotFoundError(folder)
        self.checkpoints[event.step] = list(points(f"model-{event.step}"))
        return f"model-{event.step}"

    def delete_checkpoints(self, run: object, step: int) -> None:
        self._call("delete_checkpoints", step)
        self.checkpoints.pop(step, None)

    def curve(self, key: str) -> dict[int, float]:
        """Return {step: value} of a metric, as MLflow would chart it."""
        return {point.step: point.value for point in self.points if point.key == key}

    def _call(self, name: str, argument: object) -> None:
        self.fail(name, argument)
        self.calls.append(name)


def deliverer_to(tracker: FakeTracker, folder: RunFolder, node: int = 0) -> Deliverer:
    """Return what delivers a run to this store, in a hurry and without waits between retries."""
    made = Deliverer(folder, node, lambda uri: tracker, longest_wait=0.0)  # type: ignore[arg-type, return-value]
    made.hasten()
    return made


def delivered(folder: RunFolder, tracker: FakeTracker) -> Deliverer:
    """Deliver all of a run. Raises AssertionError where that has no end."""
    made = deliverer_to(tracker, folder)
    for _ in range(200):
        if not made.work() and made.complete:
            return made
    raise AssertionError(f"not complete: {made.state}")

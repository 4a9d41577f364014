"""The store in memory gives the same results as the real client with a real store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.items import MetricPoint
from rankzero.run_store.folder import Identity
from support.memory_store import MemoryStore
from support.runs import T0, ended, make_folder, saved, started


@pytest.mark.parametrize("repeated", [1, 2])
def test_both_stores_have_the_same_after_the_same_calls(
    sqlite: str, tmp_path: Path, repeated: int
) -> None:
    folder = make_folder(tmp_path)
    events = [saved(folder, 10), saved(folder, 20)]
    found = [
        _run(store, folder.identity, folder.path, events, repeated)
        for store in (MlflowRuns(sqlite), MemoryStore(tmp_path / "log"), MemoryStore())
    ]
    assert found[1] == found[0] and found[2] == found[0]
    again = MemoryStore(tmp_path / "log")
    assert _state(again, again.open_run(folder.identity, T0)) == found[0]


def _run(
    store: Any, identity: Identity, folder: Path, events: list[Any], repeated: int
) -> dict[str, Any]:
    """Make the calls of a courier, some of them twice, as after a crash."""
    assert store.find_open_run(identity) is None
    run = store.open_run(identity, T0)
    assert store.open_run(identity, T0).run_id == run.run_id
    at = int(T0 * 1000)
    points = [MetricPoint("loss", 1.0 / step, at + step, step) for step in range(1, 6)]
    for attempt in (1, 2):
        store.start_attempt(run.run_id, started(attempt, lr=str(attempt)))
        store.log_metrics(run.run_id, points)
        store.log_metrics(run.run_id, points[1:3])
    store.log_metrics(run.run_id, [points[0]._replace(milliseconds=at + 9)])
    store.set_tags(run.run_id, {"rankzero.best": "0.5", "mlflow.note.content": "text"})
    for event in (*events, *events[:repeated]):

        def linked(model_id: str, step: int = event.step) -> list[MetricPoint]:
            return [MetricPoint("accuracy", step / 100, at + step, step, model_id)]

        store.models.save_checkpoint(run, event, folder / event.path, linked)
    store.models.delete_checkpoints(run, 10)
    store.models.delete_checkpoints(run, 10)
    store.close_run(run.run_id, ended())
    return _state(store, store.open_run(identity, T0))


def _state(store: Any, run: Any) -> dict[str, Any]:
    return {
        "marks": run.marks,
        "curves": [store.history(run.run_id, key) for key in ("loss", "accuracy")],
        "description": store.description(run.run_id),
        "checkpoints": _checkpoints(store, run),
    } | _record(store, run)


def _checkpoints(store: Any, run: Any) -> list[tuple[int, bool]]:
    if isinstance(store, MemoryStore):
        return [(step, best) for step, (_, best) in store.checkpoints.items()]
    return [(found.step, found.best) for found in store.models.list_checkpoints(run)]


def _record(store: Any, run: Any) -> dict[str, Any]:
    found = store if isinstance(store, MemoryStore) else store.find_run(run.run_id)
    kept = ("host", "rankzero.attempt", "rankzero.best", "rankzero.claim")
    tags = {key: found.tags.get(key) for key in kept}
    return {"status": found.status, "params": found.params, "tags": tags}

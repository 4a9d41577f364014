"""delivery.json: what earlier versions wrote is read, and the same fields are written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankzero.events import CheckpointDeleted, CheckpointSaved, ModelLogged, PicturesTaken, encode
from rankzero.run_store import delivery_state
from rankzero.run_store.delivery_state import DeliveryState, Problems, Queue, Task
from support.runs import T0, ended

SAVED = CheckpointSaved(T0, 10, "checkpoints/step_00000010", True, {"val/accuracy": 0.5})
DELETED = CheckpointDeleted(T0, 10, "checkpoints/step_00000010")
TAKEN = PicturesTaken(T0, 10, "pictures/00000010.npz")

OLD: dict[str, Any] = {
    "run_id": "abc",
    "experiment_id": "1",
    "attempt": 2,
    "offsets": {"events.jsonl": 1000, "system-node_0.jsonl": 50},
    "marks": {"train/loss": 40},
    "floor": {"train/loss": 20},
    "sample_offset": 3,
    "evaluated": {"10": 1800000010000},
    "waiting": [
        "artifacts",
        encode(SAVED),
        encode(DELETED),
        encode(TAKEN),
        "figures",
        "afterword",
    ],
    "ending": encode(ended()),
    "uploaded": {"artifacts/config.yaml": "7:123"},
    "infinite": {"train/loss": 30},
    "goal": "val/accuracy",
    "best": 0.5,
    "delivered": 99,
    "skipped": 4,
    "rejected": 1,
    "reasons": ["metric x: no"],
    "owners": {"a_b": "a(b"},
    "altered": 1,
    "remarks": ["param p: cut"],
    "failures": 7,
    "outages": 2,
    "away_seconds": 9.5,
    "error": "ConnectionError: refused",
    "pending_bytes": 11,
    "ended": False,
    "updated": 1800000000.0,
    "page": "0" * 64,
    "told": "1" * 64,
    "claim": "c0ffee",
}
"""Every field of the file, as it was written before the records were split."""


def test_a_file_of_an_earlier_version_is_read_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "delivery.json"
    path.write_text(json.dumps(OLD))
    state = delivery_state.load(path)
    assert state.run_id == "abc" and state.cursor.offsets == OLD["offsets"]
    assert state.queue.waiting == (
        Task.ARTIFACTS,
        SAVED,
        DELETED,
        TAKEN,
        Task.PAGE_UPDATE,
    )
    assert state.queue.ending == ended() and state.retries.failures == 7
    assert len(state.queue.awaited) == 4 and state.queue.page_update_waits
    delivery_state.save(path, state)
    written = json.loads(path.read_text())
    former = {"updated": OLD["updated"], "waiting": OLD["waiting"]}
    unused = {"pending_bytes": OLD["pending_bytes"]}
    assert written.pop("checksums") == written.pop("user_tags") == {} and not written.pop("gone")
    assert written.pop("attempt_offset") == 0 and written.pop("other_began") == 0
    assert written.pop("other_step") == -1 and written.pop("later_remarks") == []
    assert written.pop("last_artifact") == ""
    assert written.pop("best_step") == 0 and written.pop("replayed") == {}
    assert written.pop("earlier") == {}
    assert {**written, **former, **unused} == OLD
    assert written["waiting"] == [word for word in OLD["waiting"] if word != "figures"]
    assert delivery_state.load(path).queue == state.queue


@pytest.mark.parametrize("odd", ["{", encode(ended()), "unknown"])
def test_an_unknown_upload_is_counted_and_the_rest_is_kept(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "delivery.json"
    path.write_text(json.dumps(OLD | {"waiting": ["artifacts", odd], "ending": encode(SAVED)}))
    state = delivery_state.load(path)
    assert state.queue.waiting == (Task.ARTIFACTS,) and state.queue.ending is None
    assert state.problems.rejected == 3


def test_what_is_altered_again_and_again_counts_once(tmp_path: Path) -> None:
    problems = Problems()
    for number in (*range(21), *[20] * 5, 0):
        problems = problems.remark(f"tag {number}", "cut")
    delivery_state.save(tmp_path / "delivery.json", DeliveryState(problems=problems))
    problems = delivery_state.load(tmp_path / "delivery.json").problems
    assert problems.remark("tag 20", "cut") == problems
    assert problems.altered == 21 and len(problems.remarks) == 20


def test_a_missing_file_is_a_new_state(tmp_path: Path) -> None:
    assert delivery_state.load(tmp_path / "delivery.json") == DeliveryState()


def test_a_model_waits_across_a_restart(tmp_path: Path) -> None:
    queue = Queue(waiting=(ModelLogged(T0, 3, "models/step_00000003_1", "net"),))
    delivery_state.save(tmp_path / "delivery.json", DeliveryState(queue=queue))
    assert delivery_state.load(tmp_path / "delivery.json").queue == queue

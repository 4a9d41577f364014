"""A power loss takes what is not synced: MLflow still has every step once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rankzero.events import StepsLogged, encode
from rankzero.run_store import delivery_state, disk
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status
from rankzero.tracking.deliverer import Deliverer
from support.memory_store import MemoryStore, deliver, delivered
from support.pictures import arrays, taken
from support.runs import append, ended, make_folder, started, steps


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path)


@pytest.fixture
def tracker() -> MemoryStore:
    return MemoryStore()


def logged_at(first: int, last: int, late: float) -> StepsLogged:
    """Return steps with times that come `late` seconds later, and with values of their own."""
    event = steps(first, last, offset=late)
    # Longer lines than before, so that the old offset lies at an earlier step.
    more = {f"train/loss_of_part_{part}": event.metrics["train/loss"] for part in range(3)}
    times = [time + late for time in event.times]
    return StepsLogged(event.steps, times, {**event.metrics, **more})


@pytest.mark.parametrize("resumed_to", [30, 200], ids=["shorter than the offset", "longer"])
def test_steps_are_in_mlflow_once_after_the_journal_lost_its_tail(
    folder: RunFolder, tracker: MemoryStore, resumed_to: int
) -> None:
    append(folder, started(), *(steps(n, n) for n in range(1, 21)))
    synced = folder.events.stat().st_size
    append(folder, *(steps(n, n) for n in range(21, 101)))
    delivered(folder, tracker)
    os.truncate(folder.events, synced)
    append(folder, started(2, step=20), *(logged_at(n, n, 0.5) for n in range(21, resumed_to + 1)))
    append(folder, ended())
    assert not delivery_status.status(folder).done
    done = delivered(folder, tracker)
    sent = [point.step for point in tracker.sent if point.key == "train/loss"]
    assert sorted(sent) == list(range(1, max(100, resumed_to) + 1))
    assert tracker.status == "FINISHED" and done.complete
    (remark,) = done.state.problems.remarks
    assert "events.jsonl" in remark and "power loss" in remark
    assert remark in tracker.tags["mlflow.note.content"]
    assert delivered(folder, tracker).state.problems.remarks == (remark,), "reported once"


def test_metrics_that_began_after_the_lost_tail_are_sent(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), steps(1, 50))
    delivered(folder, tracker)
    os.truncate(folder.events, 0)
    append(folder, started(), logged_at(1, 50, 0.5), steps(1, 50, key="train/accuracy"), ended())
    delivered(folder, tracker)
    assert tracker.curve("train/loss") == {n: 1 / n for n in range(1, 51)}
    assert tracker.curve("train/accuracy").keys() == set(range(1, 51))


def test_state_of_an_earlier_version_continues_at_its_offset(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    # Earlier versions wrote neither a checksum of what was delivered nor one of each line.
    with folder.events.open("w") as file:
        file.writelines(encode(event) + "\n" for event in (started(), steps(1, 50)))
    delivered(folder, tracker)
    path = delivery_state.path_of(folder, 0)
    fields = json.loads(path.read_text())
    assert fields.pop("checksums")["events.jsonl"]
    path.write_text(json.dumps(fields))
    append(folder, steps(51, 60), ended())
    done = delivered(folder, tracker)
    assert [point.step for point in tracker.sent] == list(range(1, 61))
    assert not done.state.problems.remarks


def test_journal_is_synced_before_its_events_are_sent(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    order: list[str] = []

    def sync(path: Path) -> None:
        order.append(path.name)
        disk.sync(path)

    tracker.fail = lambda name, argument: order.append(name)
    append(folder, started(), steps(1, 50))
    deliverer = Deliverer(folder, 0, lambda uri: tracker, sync=sync)  # type: ignore[arg-type, return-value]
    deliverer.hasten()
    while deliverer.work():
        pass
    assert order == ["open_run", "events.jsonl", "start_attempt", "log_metrics"]


def test_pictures_are_synced_before_the_journal_that_names_them(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    order: list[Path] = []
    append(folder, started(), taken(folder, 5, arrays()), taken(folder, 9, arrays()))
    deliverer = Deliverer(folder, 0, lambda uri: tracker, sync=order.append)  # type: ignore[arg-type, return-value]
    deliver(deliverer)
    files = [folder.pictures / f"step_{step:08d}.npz" for step in (5, 9)]
    assert order == [*files, folder.pictures, folder.path, folder.events]


def test_sync_that_fails_is_on_the_page_and_delays_nothing(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    def sync(path: Path) -> None:
        raise OSError(5, "Input/output error")

    append(folder, started(), *(steps(n, n) for n in range(1, 51)), ended())
    deliverer = Deliverer(folder, 0, lambda uri: tracker, sync=sync)  # type: ignore[arg-type, return-value]
    deliver(deliverer)
    assert len(tracker.curve("train/loss")) == 50 and tracker.status == "FINISHED"
    (remark,) = deliverer.state.problems.remarks
    assert "the disk did not confirm" in remark and remark in tracker.tags["mlflow.note.content"]


def test_cut_journal_counts_as_undelivered(folder: RunFolder, tracker: MemoryStore) -> None:
    append(folder, started(), steps(1, 50), ended())
    delivered(folder, tracker)
    os.truncate(folder.events, 200)
    assert delivery_status.status(folder).pending == 200

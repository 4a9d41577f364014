"""How long the end of a training waits for its delivery. A held lock stands for the recorder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankzero.catalog import lookup
from rankzero.cli.commands import sync as sync_command
from rankzero.errors import FAILED, FINISHED
from rankzero.events import SystemSampled
from rankzero.mlflow_store import patience
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store import delivery_state as state
from rankzero.run_store import run_locks
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status, sync
from rankzero.tracking.deliverer import Deliverer
from rankzero.training.checkpoints import best_model
from support.memory_store import MemoryStore, delivered
from support.runs import T0, append, ended, make_folder, saved, started, stuck

LONG = 60.0  # seconds: nobody waits so long in these tests


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A run that has ended, and whose recorder gets nowhere."""
    with stuck(tmp_path) as made:
        yield made


def waited(folder: RunFolder) -> float:
    began = time.monotonic()
    assert not delivery_status.wait(folder).done
    return time.monotonic() - began


def test_wait_ends_after_the_grace_that_is_set(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.3")
    assert 0.3 <= waited(folder) < LONG


def test_a_server_that_refuses_is_not_waited_for_as_one_that_may_answer(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", str(10 * LONG))
    monkeypatch.setattr(patience, "_TROUBLED_SECONDS", 0.3)
    state.save(
        state.path_of(folder, 0),
        state.DeliveryState(retries=state.Retries(error="ConnectionError: refused")),
    )
    assert 0.3 <= waited(folder) < LONG


def test_another_failed_try_is_no_reason_to_wait_longer(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", str(10 * LONG))
    monkeypatch.setattr(patience, "_TROUBLED_SECONDS", 0.5)
    with progress_of(
        folder,
        lambda number: state.DeliveryState(
            retries=state.Retries(number, error=f"try {number}: refused")
        ),
    ):
        assert 0.5 <= waited(folder) < 5.0


def test_a_server_that_is_slow_for_ever_is_waited_for_no_longer_than_the_grace(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "1")
    with progress_of(folder, slowly, tries=60):
        assert 1.0 <= waited(folder) < 5.0


def test_with_a_timeout_only_time_without_progress_counts(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.5")
    with progress_of(folder, slowly, tries=20):
        began = time.monotonic()
        delivery_status.wait(folder, timeout=0.8)
        assert time.monotonic() - began > 2.0


def slowly(number: int) -> state.DeliveryState:
    """Return what a recorder has reached whose server answers, and never quickly."""
    return state.DeliveryState(run_id="abc", cursor=state.Cursor(delivered=number))


@contextlib.contextmanager
def progress_of(
    folder: RunFolder, reached: Callable[[int], state.DeliveryState], tries: int = 1000
) -> Iterator[None]:
    """Write down another progress ten times a second, some times."""
    over = threading.Event()

    def work() -> None:
        for number in range(1, tries + 1):
            if over.wait(0.1):
                return
            state.save(state.path_of(folder, 0), reached(number))

    working = threading.Thread(target=work)
    working.start()
    try:
        yield
    finally:
        over.set()
        working.join()


def test_what_is_missing_is_listed(folder: RunFolder) -> None:
    assert delivery_status.status(folder).lacks == ("the whole run",)
    read = {folder.events.name: folder.events.stat().st_size}
    state.save(
        state.path_of(folder, 0),
        state.DeliveryState(
            run_id="abc",
            queue=state.Queue((state.Task.ARTIFACTS, state.Task.PAGE_UPDATE)),
            cursor=state.Cursor(read),
        ),
    )
    assert delivery_status.status(folder).lacks == ("an upload",), (
        "no command waits for the page update"
    )
    state.save(
        state.path_of(folder, 0),
        state.DeliveryState(run_id="abc", queue=state.Queue(ending=ended())),
    )
    assert delivery_status.status(folder).lacks == ("the latest values", "its end")
    trial = make_folder(folder.path.parent.parent, parent=folder.path.name)
    append(trial, started())
    folder.add_child(trial.path.name)
    assert delivery_status.combined_status(folder).lacks == (
        "the latest values",
        "its end",
        "1 of its 1 runs",
    )


def test_run_that_has_not_begun_is_not_ended_by_sync(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    sync.deliver(folder, patience=0.0)
    assert not folder.events.exists()


def test_a_run_whose_launcher_died_before_it_began_is_ended_at_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "http://127.0.0.1:9")  # nobody answers there
    claim = run_locks.claim(folder, 0)
    sync.deliver(folder, patience=0.0)
    assert not folder.events.exists(), "it lives"
    assert lookup.listed(tmp_path / "runs")[0].status == "STARTING"
    dead = dataclasses.replace(claim, pid_started="0")
    (folder.path / "recorder.json").write_text(json.dumps(dataclasses.asdict(dead)))
    assert lookup.listed(tmp_path / "runs")[0].status == "DIED"
    sync.deliver(folder, patience=0.0)
    end = lookup.last_end(folder)
    assert end is not None and end.status == "FAILED" and "never began" in end.reason


def test_living_recorder_writes_the_end_itself(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")
    append(folder, started())
    with recorder_of_a_dead_rank_0(folder):
        sync.deliver(folder, patience=0.3)
        assert lookup.last_end(folder) is None, "closed while the recorder lived"
        says_it = threading.Timer(1.0, append, [folder, ended("FAILED", "what the recorder knows")])
        says_it.start()
        sync.deliver(folder, patience=20.0)
        says_it.join()
        end = lookup.last_end(folder)
        assert (
            end is not None
            and end.reason == "what the recorder knows"
            and delivery_status.status(folder).done
        )
    assert folder.events.read_text().count("RunEnded") == 1


def test_a_run_whose_end_is_still_to_be_written_is_not_called_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")
    append(folder, started())
    monkeypatch.setattr(sync_command, "GRACE_SECONDS", 0.3)
    with recorder_of_a_dead_rank_0(folder):
        assert sync_command.run(argparse.Namespace(dir=tmp_path, run=folder.path.name)) == 1
    assert "must write the run's end first" in capsys.readouterr().out


def test_recorder_that_dies_keeps_no_run_open(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")
    append(folder, started())
    with recorder_of_a_dead_rank_0(folder) as recorder:
        goes = threading.Timer(1.0, os.close, [recorder])
        goes.start()
        sync.deliver(folder, patience=20.0)
        goes.join()
    end = lookup.last_end(folder)
    assert end is not None and end.status == "FAILED" and "no sign of life since" in end.reason


def test_late_model_of_a_run_that_was_stopped_since_is_logged_or_not_wanted(
    tmp_path: Path, sqlite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, sqlite, experiment_file="my.py")
    append(folder, started(), ended(), started(2), ended("KILLED", "Ctrl-C"))
    folder.late_model.touch()
    asked: list[RunFolder] = []
    monkeypatch.setattr(best_model, "log_best", lambda one, _: asked.append(one))
    words = argparse.Namespace(dir=tmp_path, run=folder.path.name)
    assert sync_command.run(words) == FAILED and asked == [folder]  # MLflow did not take it
    folder.config.write_text("train:\n  mlflow:\n    log_model: false\n")
    assert sync_command.run(words) == FINISHED and asked == [folder]
    assert not folder.late_model.exists(), "delete and prune would refuse"


@contextlib.contextmanager
def recorder_of_a_dead_rank_0(folder: RunFolder) -> Iterator[int]:
    """A living recorder that does not deliver, like a trial's; yield the lock that shows it."""
    claim = dataclasses.replace(run_locks.claim(folder, 0), pid_started="0")
    (folder.path / "recorder.json").write_text(json.dumps(dataclasses.asdict(claim)))
    recorder = run_locks.announce_recorder(folder, 0, claim.token)
    assert recorder is not None
    try:
        yield recorder
    finally:
        with contextlib.suppress(OSError):
            os.close(recorder)


def test_a_clock_that_goes_back_leaves_a_delivery_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tracker = make_folder(tmp_path), MemoryStore()
    append(folder, started(), ended())
    run_locks.claim(folder, 0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    delivered(folder, tracker)
    assert delivery_status.status(folder).done
    run_locks.claim(folder, 0)
    assert not delivery_status.status(folder).done, "a newer attempt has only just begun"


@pytest.mark.parametrize("name", ["system-node_0.jsonl", "events.jsonl"])
def test_a_line_that_was_cut_does_not_wait_for_ever(tmp_path: Path, name: str) -> None:
    """By a full disk, or by a machine that went down."""
    folder = make_folder(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")
    append(folder, started(), ended())
    with (folder.path / name).open("a") as journal:
        journal.write('{"event": "RunSta')
    sync.deliver(folder, patience=20.0)
    assert delivery_status.status(folder).done
    assert any("no events" in line for line in delivery_status.status(folder).trouble)


def test_what_a_recorder_leaves_that_gives_up_is_delivered_by_who_waited(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")
    append(folder, started(), ended())
    right = run_locks.acquire(folder, 0)
    assert right is not None
    gives_up = threading.Timer(0.5, os.close, [right])
    gives_up.start()
    sync.deliver(folder, patience=20.0)
    gives_up.join()
    assert delivery_status.status(folder).done


@pytest.mark.parametrize("starts_late", [False, True])
def test_the_sample_that_a_recorder_writes_after_the_end_is_delivered(
    tmp_path: Path, starts_late: bool
) -> None:
    folder = make_folder(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")
    append(folder, started(), ended())
    token = run_locks.claim(folder, 0).token
    announce = functools.partial(run_locks.announce_recorder, folder, 0, token)
    before = None if starts_late else announce()

    def take_the_last_sample() -> None:
        recorder = before
        while recorder is None:  # another process may look at this moment
            recorder = announce()
        append(folder, SystemSampled(T0 + 101, 0, {"system/cpu": 0.5}), node=0)
        os.close(recorder)

    samples = threading.Timer(2.0, take_the_last_sample)
    samples.start()
    delivery = sync.deliver(folder, patience=20.0)
    samples.join()
    assert delivery.complete and delivery.delivered > 0


def test_samples_of_all_machines_of_a_child_are_delivered(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    parent = make_folder(tmp_path, uri)
    child = make_folder(tmp_path, uri, parent=parent.path.name)
    parent.add_child(child.path.name)
    for folder in (parent, child):
        append(folder, started(), ended())
    sync.deliver(parent, patience=20.0)
    assert delivery_status.combined_status(parent).done
    append(child, SystemSampled(1.0, 1, {"system/x": 1.0}), node=1)
    assert not delivery_status.combined_status(parent).done
    assert sync.deliver(parent, patience=20.0).done and not state.late_nodes(child)


def test_a_deleted_experiment_is_not_waited_for(tmp_path: Path, sqlite: str) -> None:
    folder = make_folder(tmp_path, sqlite)
    append(folder, started(), ended())
    client, began = MlflowRuns(sqlite)._client, time.monotonic()
    client.delete_experiment(client.create_experiment("tests"))
    assert "was deleted" in (sync.deliver(folder, patience=LONG).error or "")
    assert time.monotonic() - began < LONG


def test_a_server_that_is_away_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sync_command, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(sync, "ONE_TRY_SECONDS", 0.0)
    refuse = functools.partial(Deliverer, connect=lambda _: Path("/no/server").stat())  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(sync, "Deliverer", refuse)
    parents = [make_folder(tmp_path) for _ in range(4)]
    children = [make_folder(tmp_path, parent=parents[0].path.name) for _ in range(4)]
    for child in children:
        parents[0].add_child(child.path.name)
    for folder in (*parents, *children):
        append(folder, started(), ended())
    began = time.monotonic()
    assert sync_command.run(argparse.Namespace(dir=tmp_path, run=None)) == FAILED
    assert time.monotonic() - began < 1.5 and capsys.readouterr().out.count("/no/server") == 4


def test_a_refused_artifact_does_not_declare_its_store_away_and_keeps_no_other_run_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(called: str, argument: object) -> None:
        if called == "log_artifact" and isinstance(argument, Path) and argument.suffix == ".zip":
            raise OSError("403 Forbidden")

    first, second = made = [make_folder(tmp_path) for _ in range(2)]
    stores = {folder: MemoryStore() for folder in made}
    for folder, store in stores.items():
        store.fail = forbid
        folder.artifacts.mkdir()
        (folder.artifacts / "a.zip").write_text("a")
        append(folder, started(), saved(folder, 5), ended())
    connected = lambda folder, node: Deliverer(folder, node, lambda _: stores[folder])  # type: ignore[arg-type, return-value]  # noqa: E731
    monkeypatch.setattr(sync, "Deliverer", connected)
    monkeypatch.setattr(sync_command, "GRACE_SECONDS", 0.3)
    away = set[str]()
    assert sync_command.deliver(first, away, is_named=False, seconds=0.3) == FAILED and not away
    # Now it lacks nothing but what is refused.
    assert sync_command.deliver(first, away, is_named=False, seconds=0.3) == FAILED and away
    assert sync_command.deliver(second, away, is_named=False, seconds=0.3) == FAILED
    assert all(list(store.checkpoints) == [5] for store in stores.values())

"""Delivery against a store in memory: order, failures, refusals, crashes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import pickle
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlflow.exceptions import MlflowException, RestException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, UNAUTHENTICATED

from rankzero.catalog.summary import read_summary
from rankzero.cli.commands import sync as sync_command
from rankzero.events import ModelLogged, Noticed, SystemSampled
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.uris import ExperimentGone, RunGone
from rankzero.reporting.delivery_problems import trouble
from rankzero.run_store import delivery_state as state
from rankzero.run_store.folder import FolderGone, RunFolder
from rankzero.run_store.run_locks import claim
from rankzero.tracking import delivery_status
from rankzero.tracking.deliverer import READ_SECONDS, Deliverer
from rankzero.tracking.retry import RetryPolicy
from support.memory_store import (
    RUN_ID,
    MemoryStore,
    Refused,
    deliver,
    delivered,
    deliverer_to,
)
from support.runs import T0, append, deleted, ended, evaluated, make_folder, saved, started, steps
from support.stores import list_runs

CPU = "system/cpu_utilization_percentage"


@pytest.fixture
def tracker() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path)


def failing(times: int, name: str, error: Callable[[], Exception]) -> Callable[[str, object], None]:
    count = itertools.count()

    def fail(called: str, argument: object) -> None:
        if called == name and next(count) < times:
            raise error()

    return fail


def test_a_whole_run(folder: RunFolder, tracker: MemoryStore) -> None:
    folder.config.write_text(
        "lr: 0.1, with a secret"
    )  # stays here: what MLflow gets lies among the artifacts
    (folder.artifacts / "logs").mkdir(parents=True)
    (folder.artifacts / "config.yaml").write_text("lr: 0.1")
    (folder.artifacts / "logs" / "a.txt").write_text("hello")
    append(
        folder,
        started(),
        steps(1, 50),
        evaluated(50, 0.5),
        saved(folder, 50),
        ended(metrics={"best": 0.5}),
    )
    done = delivered(folder, tracker)
    assert tracker.curve("train/loss") == {n: 1.0 / n for n in range(1, 51)}
    assert tracker.curve("val/accuracy") == {50: 0.5}
    assert tracker.status == "FINISHED"
    assert tracker.artifacts == {"config.yaml": "lr: 0.1", "logs/a.txt": "hello"}
    assert list(tracker.checkpoints) == [50]
    assert "### FINISHED" in tracker.tags["mlflow.note.content"]
    order = [tracker.calls.index(name) for name in ("log_metrics", "close_run", "save_checkpoint")]
    assert order == sorted(order), "the status waits for no upload"
    assert done.complete and state.load(state.path_of(folder, 0)).queue.ended
    assert delivery_status.status(folder)[:4] == (53, 0, 0, True)


def test_late_state_is_not_written_into_another_run_of_the_same_name(
    folder: RunFolder, tracker: MemoryStore, tmp_path: Path
) -> None:
    append(folder, started(), steps(1, 5), ended())
    late = delivered(folder, tracker)
    identity = folder.identity
    folder.path.rename(tmp_path / "elsewhere")
    with pytest.raises(FolderGone, match="moved or deleted"):
        late.commit()
    RunFolder.create(folder.path.parent, identity)
    append(folder, started(), steps(1, 3), ended())
    with pytest.raises(FolderGone, match="moved or deleted"):
        late.commit()
    assert state.load(state.path_of(folder, 0)) == state.DeliveryState()


@pytest.mark.parametrize(
    ("uri", "most"), [("http://mlflow.example", 110), ("sqlite:////nowhere/tests.db", 13)]
)
def test_a_backlog_of_a_hundred_thousand_points_goes_in_full_batches(
    uri: str, most: int, tmp_path: Path, tracker: MemoryStore
) -> None:
    folder = make_folder(tmp_path, uri)
    append(folder, started(), *(steps(first, first + 999) for first in range(1, 100_001, 1000)))
    delivered(folder, tracker)
    assert len(tracker.sent) == 100_000
    assert tracker.calls.count("log_metrics") <= most


def test_a_server_that_is_down_loses_nothing(folder: RunFolder, tracker: MemoryStore) -> None:
    append(folder, started(), steps(1, 2500), saved(folder, 50), ended())
    calls = itertools.count()

    def flaky(name: str, argument: object) -> None:
        if next(calls) % 3:
            raise ConnectionError("server down")

    tracker.fail = flaky
    delivered(folder, tracker)
    assert tracker.curve("train/loss") == {n: 1.0 / n for n in range(1, 2501)}
    assert tracker.status == "FINISHED"


def test_error_is_in_the_state_file_until_a_success(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), steps(1, 10))
    tracker.fail = failing(2, "log_metrics", lambda: ConnectionError("server down"))
    deliverer = deliverer_to(tracker, folder)
    for _ in range(4):
        deliverer.work()
    assert "server down" in str(delivery_status.status(folder).error)
    assert delivery_status.status(folder).pending > 0
    assert any("to deliver failed" in line for line in delivery_status.status(folder).trouble)
    deliver(deliverer)
    assert delivery_status.status(folder).error is None


def test_a_crash_anywhere_replays_and_loses_nothing(tmp_path: Path) -> None:
    """Kill the deliverer at its n-th call, for every n; a new one goes on from the disk."""

    class Killed(BaseException):
        pass

    for crash in range(1, 24):
        folder, tracker = make_folder(tmp_path / str(crash)), MemoryStore()
        append(
            folder,
            started(),
            steps(1, 2500),
            evaluated(50, 0.6),
            saved(folder, 50),
            saved(folder, 60),
            deleted(50),
            ended(),
            started(2),
            steps(2000, 3000, offset=5.0),
            ended(),
        )
        shutil.rmtree(folder.checkpoints / "step_00000050")
        calls = itertools.count(1)

        def killer(name: str, argument: object, calls: Any = calls, crash: int = crash) -> None:
            if next(calls) == crash:
                raise Killed

        tracker.fail = killer
        deliverer = deliverer_to(tracker, folder)
        try:
            deliver(deliverer)
        except Killed:
            delivered(folder, tracker)
        curve = tracker.curve("train/loss")
        assert sorted(curve) == list(range(1, 3001)), crash
        assert all(value < 2 for step, value in curve.items() if step <= 2500), crash
        assert list(tracker.checkpoints) == [60], crash
        assert tracker.status == "FINISHED", crash
        assert delivery_status.status(folder).done, crash


def test_one_bad_point_does_not_take_its_batch_along(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), steps(1, 1000), ended())

    def picky(name: str, argument: Any) -> None:
        if name == "log_metrics" and any(point.step == 777 for point in argument):
            raise Refused("step 777 is not to my taste")

    tracker.fail = picky
    done = delivered(folder, tracker)
    assert len(tracker.curve("train/loss")) == 999
    assert done.state.problems.rejected == 1
    assert "train/loss at step 777: step 777 is not to my taste" in done.state.problems.reasons[0]
    assert "1 things set aside" in tracker.tags["rankzero.rejected"]
    assert tracker.status == "FINISHED"


def test_one_bad_param_or_tag_does_not_take_the_others_along(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    begin = dataclasses.replace(
        started(), params={"lr": "0.1", "LR": "0.2"}, environment={"team": "a", "TEAM": "b"}
    )
    append(folder, begin, steps(1, 10), ended())

    def picky(name: str, argument: Any) -> None:
        params = argument if name == "log_params" else getattr(argument, "params", {})
        if "LR" in params or "TEAM" in getattr(argument, "environment", {}):
            raise Refused("its name is taken")

    tracker.fail = picky
    done = delivered(folder, tracker)
    assert tracker.params == {"lr": "0.1"} and tracker.tags["team"] == "a"
    assert done.state.problems.reasons == (
        "tag TEAM: its name is taken",
        "param LR: its name is taken",
    )
    assert tracker.status == "FINISHED"


def test_item_that_always_fails_while_the_store_accepts_others_is_set_aside(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), steps(1, 2), steps(1, 2, key="poison"), ended())

    def poisoned(name: str, argument: Any) -> None:
        if name == "log_metrics" and any(point.key == "poison" for point in argument):
            raise RuntimeError("500")

    tracker.fail = poisoned
    done = delivered(folder, tracker)
    assert tracker.curve("train/loss") == {1: 1.0, 2: 0.5}
    assert done.state.problems.rejected == 2
    assert tracker.status == "FINISHED"


def test_item_is_not_blamed_for_a_server_that_answers_now_and_then(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), steps(1, 20), ended())
    chosen = random.Random(7)
    windows = (
        [False] * chosen.randint(3, 30) + [True] * chosen.randint(1, 3) for _ in itertools.count()
    )
    answers = itertools.chain.from_iterable(windows)

    def mostly_away(name: str, argument: object) -> None:
        if name != "open_run" and not next(answers):
            raise ConnectionError("away")

    tracker.fail = mostly_away
    done = delivered(folder, tracker)
    assert done.state.problems.rejected == 0, done.state.problems.reasons
    assert tracker.curve("train/loss").keys() == set(range(1, 21)) and tracker.status == "FINISHED"


_READ_ONLY = MlflowException("INSERT in a read-only transaction", error_code=BAD_REQUEST)
_READ_ONLY.response = SimpleNamespace(status_code=400)  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [OSError("database or disk is full"), _READ_ONLY])
@pytest.mark.parametrize("tries", [10, 60, 400])
def test_a_store_that_takes_no_writes_for_a_while_loses_nothing(
    tries: int, error: Exception, folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), steps(1, 20), ended())
    left = iter(range(tries))

    def full(name: str, argument: object) -> None:
        if (
            name in ("start_attempt", "log_metrics", "set_tags", "close_run")
            and next(left, None) is not None
        ):
            raise error

    tracker.fail = full
    done = delivered(folder, tracker)
    assert done.state.problems.rejected == 0, done.state.problems.reasons
    assert (
        tracker.params
        and tracker.curve("train/loss").keys() == set(range(1, 21))
        and tracker.status == "FINISHED"
    )


def test_the_parts_of_a_bad_batch_are_tested_without_the_waits_of_an_outage(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), steps(1, 64), steps(1, 2, key="poison"), ended())
    tries = itertools.count()

    def picky(name: str, argument: Any) -> None:
        if name == "log_metrics" and any(point.key == "poison" for point in argument):
            next(tries)
            raise _READ_ONLY

    tracker.fail = picky
    done = delivered(folder, tracker)
    assert done.state.problems.rejected == 2 and len(tracker.curve("train/loss")) == 64
    # 8 + 4 for the batch, and 4 for each of the 6 parts on the way to each of the two points
    assert next(tries) < 70


def test_a_checkpoint_whose_metrics_mlflow_never_takes_holds_up_no_later_one(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), saved(folder, 10), saved(folder, 20), ended())

    def picky(name: str, argument: Any) -> None:
        if name == "save_checkpoint" and argument.step == 10:
            raise _READ_ONLY

    tracker.fail = picky
    done = delivered(folder, tracker)
    assert done.complete and list(tracker.checkpoints) == [20]
    assert done.state.problems.rejected == 1


def test_the_end_is_in_mlflow_if_the_courier_dies_in_the_first_upload(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    class Killed(BaseException):
        pass

    closed: list[object] = []

    def fail(called: str, argument: object) -> None:
        if called == "close_run":
            closed.append(argument)
        if called in ("log_artifact", "save_checkpoint", "log_pictures"):
            raise Killed

    tracker.fail = fail
    folder.artifacts.mkdir()
    (folder.artifacts / "config.yaml").write_text("lr: 0.1")
    end = ended(metrics={"best": 0.1})
    append(folder, started(), steps(1, 20), saved(folder, 20), end)
    with pytest.raises(Killed):
        delivered(folder, tracker)
    assert (tracker.status, closed) == ("FINISHED", [end])
    assert tracker.curve("whole_run/best") == {0: 0.1} and "### FINISHED" in tracker.tags[NOTE]
    tracker.fail = lambda *_: None
    delivered(folder, tracker)
    assert list(tracker.checkpoints) == [20] and tracker.artifacts


def test_many_artifacts_hold_up_neither_curves_nor_the_end_and_a_kill_forgets_none(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    clock, late = [100.0], [steps(6, 9), ended()]

    def slow(called: str, argument: object) -> None:
        if called == "log_artifact":
            clock[0] += READ_SECONDS
            append(folder, *late)
            late.clear()

    folder.artifacts.mkdir()
    for name in "abc":
        (folder.artifacts / name).write_text(name)
    append(folder, started(), steps(1, 5))
    deliverer = Deliverer(folder, 0, lambda uri: tracker, clock=lambda: clock[0])  # type: ignore[arg-type, return-value]
    tracker.fail = slow
    for _ in range(30):
        if tracker.status != "FINISHED":
            deliverer.work()
    assert len(tracker.curve("train/loss")) == 9 and list(tracker.artifacts) == ["a"]
    assert list(state.load(state.path_of(folder, 0)).queue.uploaded) == ["artifacts/a"]
    deliver(deliverer)
    assert list(tracker.artifacts) == ["a", "b", "c"]


def test_artifacts_that_grow_hold_up_no_other_upload(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    clock = [100.0]

    def grow(called: str, argument: object) -> None:
        if called == "log_artifact":
            clock[0] += READ_SECONDS
            with cast(Path, argument).open("a") as file:
                file.write("line")

    folder.artifacts.mkdir()
    for name in ("a.log", "b.log", "c.txt"):
        (folder.artifacts / name).write_text(name)
    append(folder, started(), saved(folder, 5))
    deliverer = Deliverer(folder, 0, lambda uri: tracker, clock=lambda: clock[0])  # type: ignore[arg-type, return-value]
    tracker.fail = grow
    for _ in range(8):
        deliverer.work()
    assert list(tracker.artifacts) == ["a.log", "b.log", "c.txt"]
    assert list(tracker.checkpoints) == [5]


def test_the_page_comes_before_uploads_that_wait_once_its_own_wait_is_over(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    clock, fail = [100.0], failing(1, "description", lambda: ConnectionError("502"))

    def slow(called: str, argument: object) -> None:
        clock[0] += 5.0 * (called == "save_checkpoint")
        fail(called, argument)

    append(folder, started(), *(saved(folder, step) for step in (5, 10, 15)), ended())
    deliverer = Deliverer(folder, 0, lambda uri: tracker, clock=lambda: clock[0])  # type: ignore[arg-type, return-value]
    tracker.fail = slow
    for _ in range(30):
        deliverer.work()
    uploads = [call for call in tracker.calls if call in ("description", "save_checkpoint")]
    assert uploads[:4] == ["save_checkpoint", "description", *["save_checkpoint"] * 2]


def test_a_model_waits_for_the_checkpoint_whose_metrics_it_gets(
    folder: RunFolder, tracker: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[list[int]]()
    log = lambda *_: found.append(list(tracker.checkpoints))  # noqa: E731
    monkeypatch.setattr(tracker, "log_model", log, raising=False)
    tracker.fail = failing(1, "save_checkpoint", lambda: ConnectionError("502"))
    (folder.models / "net").mkdir(parents=True)
    append(folder, started(), saved(folder, 5), ModelLogged(T0, 5, "models/net", "net"), ended())
    deliverer = Deliverer(folder, 0, lambda uri: tracker, clock=lambda: 100.0)  # type: ignore[arg-type, return-value]
    for _ in range(20):
        deliverer.work()
    deliver(deliverer)
    assert found == [[5]]


def test_uploads_that_fail_hold_up_neither_curves_nor_the_end(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), saved(folder, 10), steps(1, 20), ended())
    tracker.fail = failing(50, "save_checkpoint", lambda: OSError("no space left on device"))
    deliverer = deliverer_to(tracker, folder)
    for _ in range(20):
        deliverer.work()
    assert len(tracker.curve("train/loss")) == 20
    assert tracker.status == "FINISHED"
    assert not delivery_status.status(folder).done
    deliver(deliverer)
    assert list(tracker.checkpoints) == [10]
    assert delivery_status.status(folder).done


def test_an_upload_that_always_fails_holds_up_no_other(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    def forbid(called: str, argument: object) -> None:
        if called == "log_artifact" and cast(Path, argument).stem in ("query", "a_query"):
            raise OSError("403 Forbidden")

    tracker.fail = forbid
    folder.artifacts.mkdir()
    for name in ("a_query.sql", "config.yaml", "plot.png", "query.sql", "z.txt"):
        (folder.artifacts / name).write_text(name)
    append(folder, started(), steps(1, 5), saved(folder, 5), ended())
    clock = itertools.count(100.0).__next__
    deliverer = Deliverer(folder, 0, lambda uri: tracker, clock=clock)  # type: ignore[arg-type, return-value]
    for _ in range(100):
        deliverer.work()
    assert tracker.artifacts.keys() == {"config.yaml", "plot.png", "z.txt"}
    assert list(tracker.checkpoints) == [5] and not deliverer.complete
    tracker.fail = None
    assert deliver(deliverer).complete and len(tracker.artifacts) == 5


NOTE = "mlflow.note.content"


def _delivered_with_late_trouble(
    folder: RunFolder, tracker: MemoryStore, edited: str | None = None
) -> dict[str, str]:
    """Deliver a run whose uploads still fail after its page has been written; return the tags."""
    append(folder, started(), saved(folder, 10), steps(1, 20), ended())
    tracker.fail = failing(9, "save_checkpoint", lambda: OSError("no space left on device"))
    deliverer = deliverer_to(tracker, folder)
    while tracker.status != "FINISHED":
        deliverer.work()
    deliverer.work()
    deliverer.work()
    assert "9 tries to deliver failed" not in tracker.tags[NOTE]
    tracker.tags[NOTE] = edited or tracker.tags[NOTE]
    deliver(deliverer)
    return tracker.tags


def test_problems_after_the_end_update_the_page(folder: RunFolder, tracker: MemoryStore) -> None:
    tags = _delivered_with_late_trouble(folder, tracker)
    assert "9 tries to deliver failed" in tags[NOTE] and "all was delivered later" in tags[NOTE]
    assert tags["rankzero.retries"] == "9"
    written = [call for call in tracker.calls if call == "set_tags"]
    delivered(folder, tracker)
    assert [call for call in tracker.calls if call == "set_tags"] == written, (
        "again: nothing more to tell"
    )


def test_no_command_waits_for_the_page_update(folder: RunFolder, tracker: MemoryStore) -> None:
    append(folder, started(), steps(1, 20), ended())
    deliverer = deliverer_to(tracker, folder)
    while not delivery_status.status(folder).done:
        deliverer.work()
    found = delivery_status.status(folder)
    assert found.done and found.page_update_waits and not found.pending and not deliverer.complete
    assert delivery_status.wait(folder, 5) == found and not found.complete
    assert not read_summary(folder).undelivered
    deliver(deliverer)
    assert delivery_status.status(folder).complete


def test_the_page_update_follows_the_uploads_of_a_later_attempt(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), steps(1, 20), ended("KILLED", "stopped"))
    deliverer = deliverer_to(tracker, folder)
    while not deliverer.state.queue.page_update_waits:
        deliverer.work()
    append(folder, started(2, step=20), steps(21, 30), saved(folder, 30), ended())
    order = []
    while deliverer.work() or not deliverer.complete:
        order.append(deliverer.state.queue.waiting[:1])
    assert order[-2:] == [(state.Task.PAGE_UPDATE,), ()] and tracker.checkpoints


def test_sync_updates_the_page_after_a_courier_that_died(tmp_path: Path, sqlite: str) -> None:
    folder = make_folder(tmp_path, sqlite)
    append(folder, started(), steps(1, 20), ended())
    deliverer = Deliverer(folder)
    deliverer.hasten()
    while not deliverer.state.queue.page_update_waits:
        deliverer.work()
    assert sync_command.run(argparse.Namespace(dir=tmp_path, run=None)) == 0
    assert delivery_status.status(folder).complete


def test_page_that_a_user_has_rewritten_is_kept(folder: RunFolder, tracker: MemoryStore) -> None:
    tags = _delivered_with_late_trouble(folder, tracker, edited="Our best so far.")
    assert (tags[NOTE], tags["rankzero.retries"]) == ("Our best so far.", "9")


def test_problems_are_added_to_the_page_of_a_study(folder: RunFolder, tracker: MemoryStore) -> None:
    folder.description.write_text("# The sweet spot\n")
    append(folder, Noticed(T0, "a trial's folder was lost"))
    tags = _delivered_with_late_trouble(folder, tracker)
    assert tags[NOTE].partition("-->\n\n")[2].startswith("# The sweet spot\n")
    assert "a trial's folder was lost" in tags[NOTE] and "9 tries to deliver failed" in tags[NOTE]


def test_checkpoint_deleted_before_its_upload_is_no_problem(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    event = saved(folder, 10)
    shutil.rmtree(folder.path / event.path)
    append(folder, started(), event, ended())
    assert delivered(folder, tracker).state.problems.rejected == 0
    assert not tracker.checkpoints


def test_a_checkpoint_deleted_later_in_the_journal_is_not_uploaded(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), saved(folder, 10), saved(folder, 20), deleted(10))
    delivered(folder, tracker)
    assert list(tracker.checkpoints) == [20]
    assert tracker.calls.count("save_checkpoint") == 1


def test_artifacts_that_change_are_uploaded_again_at_the_end(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    folder.artifacts.mkdir()
    (folder.artifacts / "config.yaml").write_text("old")
    append(folder, started())
    deliverer = delivered(folder, tracker)
    (folder.artifacts / "config.yaml").write_text("new!")
    folder.failures.mkdir()
    (folder.failures / "rank_1.json").write_text("{}")
    append(folder, ended())
    deliver(deliverer)
    assert tracker.artifacts == {"config.yaml": "new!", "failures/rank_1.json": "{}"}
    assert tracker.calls.count("log_artifact") == 3


def test_a_run_deleted_in_mlflow_ends_the_delivery_until_it_is_restored(
    folder: RunFolder, tracker: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    append(folder, started(), steps(1, 5000))
    delivered(folder, tracker)

    def refuse(name: str, argument: object) -> None:
        if name != "require_run":
            raise Refused("must be in the 'active' state")

    append(folder, steps(5001, 10_000), saved(folder, 10_000), ended())
    deliverer = deliverer_to(tracker, folder)
    deliverer.work()
    tracker.gone, tracker.fail = True, refuse
    deliver(deliverer, 10)
    deliver(deliverer_to(tracker, folder), 10)
    found = delivery_status.status(folder)
    assert not found.done and found.pending and not found.rejected
    assert "run-1 was deleted: `rankzero delete --restore" in (found.error or "")
    assert caplog.text.count("is not delivered") == 1
    tracker.gone, tracker.fail = False, None
    again = delivered(folder, tracker)
    assert delivery_status.status(folder).complete and not trouble(again.state)
    assert len(tracker.curve("train/loss")) == 10_000 and 10_000 in tracker.checkpoints


def test_a_run_restored_while_it_trains_is_delivered_again_within_a_minute(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    clock = [100.0]
    append(folder, started())
    deliverer = Deliverer(folder, 0, lambda uri: tracker, clock=lambda: clock[0])  # type: ignore[arg-type, return-value]
    tracker.fail = failing(1, "log_metrics", lambda: Refused("not active"))
    for gone in (False, True, True, False):
        tracker.gone = gone
        while deliverer.work():
            pass
        assert deliverer.state.retries.gone == gone
        append(folder, steps(1, 9))
        clock[0] += 60.0
    assert len(tracker.curve("train/loss")) == 9 and not deliverer.state.problems.rejected


def test_a_deleted_child_is_asked_for_less_and_less_often(tmp_path: Path) -> None:
    clock = [0.0]
    append(child := make_folder(tmp_path, parent="study"), started())
    deliverer = Deliverer(child, clock=lambda: clock[0])
    for wait in (60.0, 120.0, 240.0):
        deliverer._abandon(RunGone("deleted"))
        clock[0] += wait - 1
        assert deliverer.complete
        clock[0] += 1
        assert not deliverer.complete


def test_gaps_of_a_restored_backup_are_filled_in_a_new_run(tmp_path: Path, sqlite: str) -> None:
    """As docs/troubleshooting.md has it."""
    folder = make_folder(tmp_path, sqlite)
    append(folder, started(), steps(1, 6))
    deliver(Deliverer(folder))
    with contextlib.closing(sqlite3.connect(sqlite.removeprefix("sqlite:///"))) as database:
        database.execute("DELETE FROM metrics WHERE step > 3")
        database.commit()
    append(folder, steps(7, 9), ended())
    deliver(Deliverer(folder))
    (found,) = list_runs(sqlite)
    assert len(MlflowRuns(sqlite).history(found.run_id, "train/loss")) == 6
    MlflowRuns(sqlite)._client.delete_run(found.run_id)
    state.path_of(folder, 0).unlink()
    assert sync_command.run(argparse.Namespace(dir=tmp_path, run=folder.path.name)) == 0
    (found,) = list_runs(sqlite)
    assert len(MlflowRuns(sqlite).history(found.run_id, "train/loss")) == 9


def test_a_renamed_experiment_or_a_deleted_run_gets_no_second_run(
    tmp_path: Path, sqlite: str
) -> None:
    folder = make_folder(tmp_path, sqlite)
    append(folder, started(), steps(1, 3))
    deliver(Deliverer(folder))
    (record,) = list_runs(sqlite)
    client = MlflowRuns(sqlite)._client
    client.rename_experiment(record.experiment_id, "another name")
    append(folder, steps(4, 6), ended())
    deliver(Deliverer(folder))
    (found,) = list_runs(sqlite)
    assert found.run_id == record.run_id and found.status == "FINISHED"
    assert found.marks["train/loss"] == 6
    client.delete_run(record.run_id)
    append(folder, started(2, step=6), steps(7, 9), ended())
    assert "was deleted" in (deliver(Deliverer(folder)).state.retries.error or "")
    assert not list_runs(sqlite)
    MlflowRuns(sqlite).deletion.erase(record.run_id)
    erased = deliver(Deliverer(folder)).state.retries.error or ""
    assert "delete --discard-undelivered" in erased and "--restore" not in erased
    assert "if MLflow has another database now" in erased


@pytest.mark.parametrize("nested", [False, True])
def test_children_of_a_run_whose_experiment_was_renamed_are_below_it(
    nested: bool, tmp_path: Path, sqlite: str
) -> None:
    parent = make_folder(tmp_path, sqlite)
    append(parent, started())
    deliver(Deliverer(parent))
    (record,) = list_runs(sqlite)
    MlflowRuns(sqlite)._client.rename_experiment(record.experiment_id, "another name")
    above = parent.identity.uuid if nested else None
    child = make_folder(tmp_path, sqlite, parent=parent.path.name, parent_uuid=above)
    append(child, started())
    deliver(Deliverer(child))
    sampled(child, CPU, 0, 2, node=1)
    deliver(Deliverer(child, 1))
    found = {one.name: one for one in list_runs(sqlite)}
    assert found[child.path.name].experiment_id == record.experiment_id
    assert found[child.path.name].tags["mlflow.parentRunId"] == record.run_id
    assert found[child.path.name].marks[CPU] == 2


def test_an_outage_is_counted_once_and_timed_while_it_lasts() -> None:
    now, retries = [0.0], state.Retries()
    for _ in range(2):  # the courier is started again
        policy = RetryPolicy(30.0, lambda: now[0])
        for _ in range(3):
            retries = policy.failed("send", retries, "refused")
            now[0] += 15.0
    assert (retries.outages, retries.away_seconds) == (1, 60.0)
    retries = policy.succeeded("send", retries, reached=True)
    assert (retries.outages, retries.away_seconds, retries.error) == (1, 75.0, None)
    for answered in (True, False):
        retries = policy.failed("send", retries, "refused", answered=answered)
    assert retries.outages == 2


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ExperimentGone("the MLflow experiment was deleted"), "was deleted"),
        (MlflowException("log in", error_code=UNAUTHENTICATED), "log in"),
        (RestException({"error_code": "PERMISSION_DENIED", "message": "not you"}), "not you"),
    ],
)
def test_a_refusal_is_no_outage(
    error: Exception, says: str, folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), ended())

    def refuse(name: str, argument: object) -> None:
        raise error

    tracker.fail = refuse
    deliverer = deliverer_to(tracker, folder)
    deliverer.work()
    lines = trouble(deliverer.state)
    assert "1 try to deliver failed" in lines and says in lines[-1]
    tracker.fail = None
    assert trouble(deliver(deliverer).state) == ["1 try to deliver failed; all was delivered later"]


def test_lost_state_continues_from_what_mlflow_has(folder: RunFolder, tracker: MemoryStore) -> None:
    append(folder, started(), steps(1, 100))
    delivered(folder, tracker)
    state.path_of(folder, 0).write_text("{ damaged")
    append(folder, steps(101, 120))
    delivered(folder, tracker)
    assert [point.step for point in tracker.sent] == list(range(1, 121))


@pytest.mark.parametrize("lost", [False, True])
def test_a_step_between_those_of_an_earlier_attempt_is_sent(
    folder: RunFolder, tracker: MemoryStore, lost: bool
) -> None:
    append(folder, started(), *(evaluated(step, 0.5) for step in (10, 20, 30, 40)))
    delivered(folder, tracker)
    if lost:
        state.path_of(folder, 0).unlink()
    append(folder, started(2), *(evaluated(step, 0.9) for step in (25, 30, 35, 40, 45)), ended())
    delivered(folder, tracker)
    curve = {10: 0.5, 20: 0.5, 25: 0.9, 30: 0.5, 35: 0.9, 40: 0.5, 45: 0.9}
    assert tracker.curve("val/accuracy") == curve and each_value_once(tracker)


def test_resume_on_another_machine_continues_the_samples(
    tmp_path: Path, tracker: MemoryStore
) -> None:
    folder = make_folder(tmp_path, mlflow_run_id="run-1")
    tracker.points = {
        "train/loss": {50: {(0, 0.02)}},
        CPU: {9: {(0, 1.0)}},
        "whole_run/best": {4: {(0, 1.0)}},
    }
    append(folder, started(1, step=40), steps(41, 60), ended(metrics={"best": 0.5}))
    append(folder, SystemSampled(T0, 0, {CPU: 1.0}), node=0)
    delivered(folder, tracker)
    assert list(tracker.curve("train/loss")) == list(range(50, 61))
    assert list(tracker.curve(CPU)) == [9, 10]
    assert list(tracker.curve("whole_run/best")) == [4, 5]


def sampled(
    folder: RunFolder, key: str, first: int, last: int, node: int = 0, time: float = T0
) -> None:
    events = (SystemSampled(time, number, {key: 1.0}) for number in range(first, last + 1))
    append(folder, *events, node=node)


def test_a_run_that_returns_from_another_machine_sends_no_step_twice(
    tmp_path: Path, tracker: MemoryStore
) -> None:
    """MLflow did not answer as the attempt began, so it trains again what the other one trained."""
    folder = make_folder(tmp_path, "http://127.0.0.1:9")
    claim(folder, 0)
    append(folder, started(), steps(1, 50))
    sampled(folder, CPU, 0, 4)
    delivered(folder, tracker)
    tracker.points["train/loss"] |= {step: {(0, 0.02)} for step in range(51, 81)}
    tracker.points[CPU] |= {number: {(0, 2.0)} for number in range(5, 12)}
    claim(folder, 0)
    append(folder, started(2, step=40), steps(41, 60))
    sampled(folder, CPU, 5, 6)
    delivered(folder, tracker)
    append(folder, steps(61, 90))
    sampled(folder, CPU, 7, 7)
    delivered(folder, tracker)
    assert sorted(tracker.curve("train/loss")) == list(range(1, 91))
    assert list(tracker.curve(CPU)) == list(range(15))
    assert all(len(seen) == 1 for curve in tracker.points.values() for seen in curve.values())


def test_what_another_machine_sent_is_asked_for_until_the_run_is_opened(
    tmp_path: Path, tracker: MemoryStore
) -> None:
    """The first courier of the new attempt dies before MLflow answers."""

    def away(_: str) -> MlflowRuns:
        raise ConnectionError("away")

    folder = make_folder(tmp_path, "http://127.0.0.1:9")
    claim(folder, 0)
    append(folder, started(), steps(1, 50))
    delivered(folder, tracker)
    tracker.points["train/loss"] |= {step: {(0, 0.02)} for step in range(51, 61)}
    claim(folder, 0)
    append(folder, started(2, step=50), steps(51, 70))
    first = Deliverer(folder, 0, away, longest_wait=0.0)
    first.hasten()
    assert not first.work()
    first.commit()
    delivered(folder, tracker)
    assert all(len(seen) == 1 for seen in tracker.points["train/loss"].values())
    assert sorted(tracker.curve("train/loss")) == list(range(1, 71))


LATER = max(T0, time.time()) + 1000


def continued_elsewhere(
    root: Path, folder: RunFolder, tracker: MemoryStore, first: int, last: int
) -> None:
    """Continue a delivered run on another machine, `b`, from the step before `first`."""
    uri, uuid = folder.identity.tracking_uri, folder.identity.uuid
    other = make_folder(root / "b", uri, uuid=uuid, mlflow_run_id=RUN_ID)
    begun = dataclasses.replace(started(step=first), time=LATER)
    append(other, dataclasses.replace(begun, environment={"rankzero.host": "b"}))
    append(other, steps(first, last, offset=0.02), saved(other, last), ended(reason="by b"))
    sampled(other, CPU, 0, 3)
    delivered(other, tracker)
    assert tracker.tags["rankzero.claim"] == f"{LATER!r} b"


def on_a_server(root: Path, tracker: MemoryStore) -> RunFolder:
    """A run whose machine goes down with steps that are not delivered."""
    folder = make_folder(root, "http://127.0.0.1:9")
    claim(folder, 0)
    append(folder, started(), steps(1, 50))
    sampled(folder, CPU, 0, 4)
    delivered(folder, tracker)
    append(folder, steps(51, 80), saved(folder, 60), saved(folder, 80))
    sampled(folder, CPU, 5, 7)
    return folder


def each_value_once(tracker: MemoryStore) -> bool:
    return all(len(seen) == 1 for curve in tracker.points.values() for seen in curve.values())


@pytest.mark.parametrize("lost", [(), ("recorder.json",), ("delivery.json", "recorder.json")])
def test_a_machine_that_comes_back_changes_nothing_of_a_run_that_another_one_continued(
    tmp_path: Path, tracker: MemoryStore, lost: Sequence[str]
) -> None:
    folder = on_a_server(tmp_path, tracker)
    continued_elsewhere(tmp_path, folder, tracker, 51, 60)
    for name in lost:
        (folder.path / name).write_text("{ damaged")
    append(folder, deleted(60), ended("FAILED"))
    before = pickle.dumps((tracker.points, tracker.tags, tracker.checkpoints, tracker.artifacts))
    for _ in range(2):
        retries = delivered(folder, tracker).state.retries
        assert retries.gone and "b has continued the run" in (retries.error or "")
    assert tracker.status == "FINISHED" and tracker.tags["rankzero.reason"] == "by b"
    now = pickle.dumps((tracker.points, tracker.tags, tracker.checkpoints, tracker.artifacts))
    assert now == before and each_value_once(tracker)


def test_a_run_that_comes_back_after_another_machine_keeps_what_each_one_did(
    tmp_path: Path, tracker: MemoryStore
) -> None:
    """The first machine's rest is delivered with its new attempt, which owns the run."""
    folder = on_a_server(tmp_path, tracker)
    continued_elsewhere(tmp_path, folder, tracker, 51, 60)
    theirs = tracker.checkpoints[60][0]
    append(folder, ended("FAILED"))
    delivered(folder, tracker)
    claim(folder, 0)
    append(folder, dataclasses.replace(started(2, step=80), time=LATER + 1000))
    append(folder, steps(81, 90), saved(folder, 90), ended(reason="back"))
    done = delivered(folder, tracker)
    assert sorted(tracker.curve("train/loss")) == list(range(1, 91)) and each_value_once(tracker)
    assert tracker.curve("train/loss")[60] == pytest.approx(1 / 60 + 0.02)
    assert list(tracker.curve(CPU)) == list(range(12))
    assert sorted(tracker.checkpoints) == [60, 80, 90] and tracker.checkpoints[60][0] == theirs
    assert (tracker.status, tracker.tags["rankzero.reason"]) == ("FINISHED", "back")
    assert not done.state.retries.error and delivery_status.status(folder).complete


@pytest.mark.parametrize("rest", ["the end", "an upload", "steps"])
def test_a_courier_whose_run_another_machine_continues_meanwhile_sends_no_more(
    tmp_path: Path, tracker: MemoryStore, rest: str
) -> None:
    now, store = [0.0], cast("MlflowRuns", tracker)
    folder = on_a_server(tmp_path, tracker)
    first = Deliverer(folder, 0, lambda _: store, longest_wait=0.0, clock=lambda: now[0])
    first.hasten()
    deliver(first)
    continued_elsewhere(tmp_path, folder, tracker, 81, 90)
    if rest == "the end":
        append(folder, ended("FAILED"))
    elif rest == "an upload":
        append(folder, deleted(90))
    else:
        now[0] = 60.0
        append(folder, steps(81, 100))
    deliver(first)
    assert tracker.status == "FINISHED" and 90 in tracker.checkpoints
    assert sorted(tracker.curve("train/loss")) == list(range(1, 91)) and each_value_once(tracker)
    assert "b has continued the run" in (delivery_status.status(folder).error or "")


def test_a_new_attempt_owns_the_run_although_its_machine_is_behind(
    tmp_path: Path, tracker: MemoryStore
) -> None:
    """The clock of the machine that was lost was ahead."""
    folder = on_a_server(tmp_path, tracker)
    tracker.tags["rankzero.claim"] = f"{LATER!r} ahead"
    claim(folder, 0)
    append(folder, started(2, step=80), steps(81, 90), ended(reason="behind"))
    delivered(folder, tracker)
    assert tracker.tags["rankzero.claim"] == repr(T0 + 80)
    assert (tracker.status, tracker.tags["rankzero.reason"]) == ("FINISHED", "behind")


def test_the_nodes_of_an_attempt_share_it(folder: RunFolder, tracker: MemoryStore) -> None:
    tracker.open_run(folder.identity, T0)
    tracker.tags["rankzero.claim"] = f"{LATER!r} first"
    sampled(folder, CPU.replace("/", "/node_1/"), 0, 3, node=1)
    deliver(deliverer_to(tracker, folder, node=1))
    assert len(tracker.sent) == 4


def test_samples_that_a_killed_courier_sent_are_no_other_machines(
    tmp_path: Path, tracker: MemoryStore
) -> None:
    folder = make_folder(tmp_path, "http://127.0.0.1:9")
    claim(folder, 0)
    append(folder, started())
    sampled(folder, CPU, 0, 4)
    delivered(folder, tracker)
    before = state.path_of(folder, 0).read_text()
    sampled(folder, CPU, 5, 9, time=1.0)
    delivered(folder, tracker)
    state.path_of(folder, 0).write_text(before)
    claim(folder, 0)
    append(folder, started(2))
    sampled(folder, CPU, 10, 12)  # after the claim, as T0 is
    delivered(folder, tracker)
    assert list(tracker.curve(CPU)) == list(range(13))


def test_a_replay_within_an_attempt_sends_its_points_again(
    tmp_path: Path, tracker: MemoryStore
) -> None:
    folder = make_folder(tmp_path, "http://127.0.0.1:9")
    claim(folder, 0)
    append(folder, started(), steps(1, 5))
    delivered(folder, tracker)
    append(folder, steps(6, 9))
    before = state.path_of(folder, 0).read_text()
    delivered(folder, tracker)
    state.path_of(folder, 0).write_text(before)
    sent = len(tracker.sent)
    delivered(folder, tracker)
    assert [point.step for point in tracker.sent[sent:]] == [6, 7, 8, 9]


@pytest.mark.parametrize("lost", [False, True])
def test_the_samples_of_a_replaced_second_machine_follow_those_of_the_first(
    tmp_path: Path, tracker: MemoryStore, lost: bool
) -> None:
    """A machine that has lost its state alone sends nothing again."""
    key = CPU.replace("/", "/node_1/")
    folder = make_folder(tmp_path)
    tracker.open_run(folder.identity, T0)
    tracker.points = {CPU.replace("/", "/node_0/"): {30: {(0, 1.0)}}, key: {9: {(0, 1.0)}}}
    if lost:
        state.path_of(folder, 1).write_text("{ damaged")
    sampled(folder, key, 0, 10, node=1)
    deliver(deliverer_to(tracker, folder, node=1))
    assert list(tracker.curve(key)) == ([9, 10] if lost else list(range(9, 21)))


def test_a_second_machine_that_comes_back_changes_no_sample_of_its_successor(
    tmp_path: Path, tracker: MemoryStore
) -> None:
    key = CPU.replace("/", "/node_1/")
    first, second = make_folder(tmp_path / "first"), make_folder(tmp_path / "second")
    second.write_identity(first.identity)
    tracker.open_run(first.identity, T0)
    claim(first, 1)
    sampled(first, key, 0, 9, node=1)
    deliver(deliverer_to(tracker, first, node=1))
    sampled(first, key, 10, 14, node=1)  # the network is lost
    claim(second, 1)
    sampled(second, key, 0, 9, node=1, time=T0 + 60)
    deliver(deliverer_to(tracker, second, node=1))
    deliver(deliverer_to(tracker, first, node=1))
    seen = tracker.points[key]
    assert seen.keys() == set(range(20)) and all(len(values) == 1 for values in seen.values())


def test_another_node_waits_for_the_run_and_sends_its_samples_only(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, SystemSampled(T0, 0, {"system/node_1/cpu": 1.0}), node=1)
    append(folder, started(), steps(1, 3))
    second = deliverer_to(tracker, folder, node=1)
    assert not second.work()
    tracker.open_run(folder.identity, T0)
    deliver(second)
    assert {point.key for point in tracker.sent} == {"system/node_1/cpu"}
    assert state.path_of(folder, 1).name == "delivery-node_1.json"


def test_store_that_cannot_be_opened_is_retried(folder: RunFolder) -> None:
    def broken(uri: str) -> Any:
        raise ImportError("no module named mlflow")

    append(folder, started())
    deliverer = Deliverer(folder, 0, broken, longest_wait=0.0)
    for _ in range(20):
        assert not deliverer.work()
    assert "no module named mlflow" in str(delivery_status.status(folder).error)


def test_a_line_that_is_not_whole_yet_is_no_work(folder: RunFolder, tracker: MemoryStore) -> None:
    append(folder, started())
    with folder.events.open("a") as journal:
        journal.write('{"event": "RunSta')
    deliverer = deliverer_to(tracker, folder)
    deliverer.hasten()
    worked = [deliverer.work() for _ in range(20)]
    assert worked[0] and not any(worked[-5:]) and not deliverer.complete


def test_a_line_that_is_not_whole_holds_up_no_end(folder: RunFolder, tracker: MemoryStore) -> None:
    append(folder, started(), steps(1, 5), ended())
    with folder.events.open("a") as journal:
        journal.write('{"event": "Noti')
    deliverer = deliverer_to(tracker, folder)
    for _ in range(20):
        deliverer.work()
    assert tracker.status == "FINISHED" and not deliverer.complete
    with folder.events.open("a") as journal:
        journal.write("\n")
    append(folder, steps(6, 7))
    deliver(deliverer)
    assert len(tracker.sent) == 7 and deliverer.complete


def test_a_node_asks_less_and_less_for_a_run_that_is_not_there_yet(tmp_path: Path) -> None:
    """Many nodes kept the server busy, so that node 0 took longer to create the run."""
    folder, now, asked = make_folder(tmp_path), [100.0], list[float]()
    append(folder, SystemSampled(T0, 0, {"system/node_1/cpu": 1.0}), node=1)
    store: Any = SimpleNamespace(find_open_run=lambda *_: asked.append(now[0]))
    waiting = Deliverer(folder, 1, lambda _: store, clock=lambda: now[0])
    while now[0] < 160.0:
        assert not waiting.work()
        now[0] += 0.5
    assert 4 < len(asked) < 12 and not waiting.state.retries.failures
    waiting.hasten()
    assert not waiting.work() and asked[-1] == now[0]


def test_a_full_disk_of_the_run_is_no_outage_of_mlflow(
    folder: RunFolder, tracker: MemoryStore
) -> None:
    append(folder, started(), steps(1, 2), saved(folder, 2), ended())
    deliverer, path = deliverer_to(tracker, folder), state.path_of(folder, 0)
    deliverer._path = path.parent / "full" / path.name
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            deliverer.work()
    assert deliverer.complete and tracker.checkpoints and not deliverer.state.retries.failures


def test_small_batches_are_collected(folder: RunFolder, tracker: MemoryStore) -> None:
    clock = [100.0]
    append(folder, started())
    deliverer = Deliverer(folder, 0, lambda uri: tracker, clock=lambda: clock[0])  # type: ignore[arg-type, return-value]
    while deliverer.work():
        pass
    for step in range(1, 11):
        append(folder, steps(step, step))
        while deliverer.work():
            pass
        clock[0] += READ_SECONDS / 5
    assert len(tracker.sent) == 6  # all that came until it was time to take
    deliverer.hasten()
    deliver(deliverer)
    assert len(tracker.sent) == 10 and tracker.calls.count("log_metrics") == 2

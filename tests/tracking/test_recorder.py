"""The recorder as a process: real deaths, real servers."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rankzero.events import RunEnded
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.client.records import RunRecord
from rankzero.mlflow_store.uris import default_tracking_uri
from rankzero.run_store import disk, run_locks
from rankzero.run_store.attempt import DIED_WITHOUT_END, LiveAttempt
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.tracking import delivery_status, recorder, sync
from rankzero.tracking.recorder import RecorderHandle
from support.commands import wait_until
from support.paths import SUPPORT
from support.runs import append, ended, make_folder, started, steps
from support.stores import Server, list_runs

FAKE = SUPPORT / "fake_rank0.py"


@pytest.fixture
def folder(tmp_path: Path, sqlite: str) -> RunFolder:
    return make_folder(tmp_path, sqlite)


def rank0(folder: RunFolder, count: int, seconds: float, end: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, FAKE, folder.path, str(count), str(seconds), end],
        text=True,
        stdout=subprocess.PIPE,
    )


def last(folder: RunFolder) -> RunEnded:
    event = list(read_all(folder.events))[-1]
    assert isinstance(event, RunEnded)
    return event


def curve(uri: str, run_id: str | None) -> list[int]:
    return [point.step for point in MlflowRuns(uri).history(str(run_id), "train/loss")]


def log_of(folder: RunFolder) -> str:
    return (folder.path / "recorder.log").read_text()


def test_rank_0_is_killed(folder: RunFolder, sqlite: str) -> None:
    """MLflow has the whole journal and the right status, although a forked child still lives."""
    process = rank0(folder, 40, 0.05, "die")
    wait_until(lambda: run_locks.is_recording(folder))
    [beside] = [
        child
        for child in psutil.Process(process.pid).children()
        if "recorder" in " ".join(child.cmdline())
    ]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        beside.send_signal(number)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    delivery = delivery_status.wait(folder, 60)
    assert delivery.done, log_of(folder)
    assert (last(folder).status, last(folder).reason) == ("FAILED", DIED_WITHOUT_END)
    record = MlflowRuns(sqlite).find_run(str(delivery.run_id))
    assert record.status == "FAILED" and record.tags["rankzero.reason"].startswith(DIED_WITHOUT_END)
    assert curve(sqlite, delivery.run_id) == list(range(1, 41))
    assert "system/cpu_utilization_percentage" in record.metrics
    assert log_of(folder) == ""


def test_trials_on_other_machines_end_with_a_killed_search(
    folder: RunFolder, sqlite: str, tmp_path: Path
) -> None:
    """Their own recorders are on those machines, and so are the ends that these write."""
    trial, own = (
        make_folder(tmp_path, sqlite, name=name, parent=folder.identity.name)
        for name in ("trial", "own")
    )
    claims = "from pathlib import Path; from rankzero.run_store import run_locks; import sys; "
    claims += "from rankzero.run_store.folder import RunFolder; "
    claims += "[run_locks.claim(RunFolder(Path(one)), 0) for one in sys.argv[1:]]"
    for child in (trial, own):
        folder.add_child(child.identity.name)
        append(child, started(), steps(1, 5))
    subprocess.run([sys.executable, "-c", claims, trial.path], check=True)
    run_locks.claim(own, 0)  # A trial whose ranks still live writes its end by itself.
    rank0(folder, 40, 0.05, "die").communicate()

    def failed() -> list[RunRecord]:
        runs = [one for one in list_runs(sqlite) if one.name == "trial"]
        return [one for one in runs if one.status == "FAILED"]

    wait_until(failed)
    assert last(trial).status == "FAILED"
    assert curve(sqlite, failed()[0].run_id) == [1, 2, 3, 4, 5]
    assert not any(isinstance(event, RunEnded) for event in read_all(own.events))


@pytest.mark.slow
def test_a_server_is_killed_and_comes_back(tmp_path: Path, server: Server) -> None:
    """Nothing is lost or there twice, also if the courier is killed. Training is not slowed."""
    folder = make_folder(tmp_path, server.uri)
    process = rank0(folder, 450, 0.04, "finish")
    try:
        wait_until(lambda: delivery_status.status(folder).delivered > 0)
        server.kill()
        wait_until(lambda: delivery_status.status(folder).error)
        assert process.poll() is None
        server.start()
        for courier in psutil.Process(process.pid).children(recursive=True):
            if "courier" in " ".join(courier.cmdline()):
                courier.kill()
        slowest, _ = process.communicate()
        delivery = delivery_status.wait(folder, 60)
        assert delivery.done, log_of(folder)
        assert curve(server.uri, delivery.run_id) == list(range(1, 451))
        assert MlflowRuns(server.uri).find_run(str(delivery.run_id)).status == "FINISHED"
        assert float(slowest) < 0.5
    finally:
        process.kill()
        server.start()
        server.wait()


@pytest.fixture
def recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RunFolder, RecorderHandle]]:
    """A recorder of this process for a server that is not there, and that gives up soon."""
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "2")
    folder = make_folder(tmp_path, "http://127.0.0.1:9")
    made = recorder.start(folder, [], 0)
    yield folder, made
    made.close()
    wait_until(lambda: not run_locks.is_recording(folder))


def test_starting_costs_milliseconds(tmp_path: Path) -> None:
    processor, elapsed, handles = [], [], []
    folders = [make_folder(tmp_path, "http://127.0.0.1:9") for _ in range(5)]
    for folder in folders:
        begin, begin_of_processor = time.perf_counter(), time.thread_time()
        handles.append(recorder.start(folder, [], 0))
        elapsed.append(time.perf_counter() - begin)
        processor.append(time.thread_time() - begin_of_processor)
    for handle in handles:
        for process in (*psutil.Process(handle.pid).children(), psutil.Process(handle.pid)):
            process.kill()
        handle.close()
        handle.close()
    assert min(processor) < 0.010
    # A recorder takes longer than this to import its modules, so `start` did not wait for one.
    # The bar is not lower, because other tests may hold both cores.
    assert min(elapsed) < 0.100


def test_a_newer_attempt_ends_the_older_recorder_at_once(
    recording: tuple[RunFolder, RecorderHandle], sqlite: str
) -> None:
    """The older does not deliver, the newer gives up on the dead server, `sync` delivers both."""
    folder, older = recording
    append(folder, started(), steps(1, 10))
    wait_until(lambda: run_locks.is_recording(folder))
    newer = recorder.start(folder, [], 0)
    begin = time.monotonic()
    wait_until(
        lambda: (
            not psutil.pid_exists(older.pid)
            or psutil.Process(older.pid).status() == psutil.STATUS_ZOMBIE
        )
    )
    assert (
        time.monotonic() - begin < 10
    )  # it does not wait for its courier, which may be importing mlflow
    assert not any(isinstance(event, RunEnded) for event in read_all(folder.events))
    append(folder, started(2, step=5), steps(6, 20, offset=3.0), ended())
    newer.close()
    wait_until(lambda: delivery_status.status(folder).error and not run_locks.is_recording(folder))
    assert not delivery_status.status(folder).done
    assert delivery_status.status(folder).pending > 0
    identity = json.loads((folder.path / "run.json").read_text())
    (folder.path / "run.json").write_text(json.dumps({**identity, "tracking_uri": sqlite}))
    delivery = sync.deliver(folder, patience=20)
    assert delivery.done
    assert curve(sqlite, delivery.run_id) == list(range(1, 21))
    assert MlflowRuns(sqlite).find_run(str(delivery.run_id)).status == "FINISHED"


def test_recorder_that_waits_for_the_lock_counts_as_alive(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older attempt's may hold it for long on a busy machine; between the two nobody does."""
    monkeypatch.setattr(delivery_status, "STARTUP_SECONDS", 0.0)
    older = run_locks.acquire(folder, 0)
    assert older is not None
    newer = recorder.start(folder, [], 0)
    wait_until(lambda: run_locks.has_live_recorder(folder))
    process = psutil.Process(newer.pid)
    process.suspend()
    os.close(older)
    assert not run_locks.is_recording(folder)
    begin = time.monotonic()
    delivery_status.wait(folder, timeout=1.0)
    assert time.monotonic() - begin >= 1.0
    process.kill()
    newer.close()
    wait_until(lambda: not run_locks.has_live_recorder(folder))
    begin = time.monotonic()
    delivery_status.wait(folder, timeout=60.0)
    assert time.monotonic() - begin < 10


def test_sync_closes_what_nobody_is_left_to_close(folder: RunFolder, sqlite: str) -> None:
    process = rank0(folder, 20, 0.02, "massacre")
    process.communicate()
    wait_until(lambda: not run_locks.is_recording(folder))
    delivery = sync.deliver(folder, patience=20)
    assert delivery.done
    record = MlflowRuns(sqlite).find_run(str(delivery.run_id))
    assert record.status == "FAILED" and record.tags["rankzero.reason"].startswith(DIED_WITHOUT_END)
    assert curve(sqlite, delivery.run_id) == list(range(1, 21))
    assert sync.deliver(folder, patience=5) == delivery


def test_sync_leaves_a_run_open_whose_writer_lives(folder: RunFolder, sqlite: str) -> None:
    run_locks.claim(folder, 0)
    append(folder, started(), steps(1, 5))
    delivery = sync.deliver(folder, patience=20)
    assert MlflowRuns(sqlite).find_run(str(delivery.run_id)).status == "RUNNING"
    assert not delivery.done
    assert delivery.pending == 0


class TestAttempt:
    """The conclusions of the processes beside rank 0."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> RunFolder:
        return make_folder(tmp_path, default_tracking_uri(tmp_path))

    @pytest.fixture
    def attempt(self, folder: RunFolder) -> Iterator[LiveAttempt]:
        """An attempt whose rank 0 is dead."""
        reader, writer = os.pipe()
        os.close(writer)
        yield LiveAttempt(folder, 0, run_locks.claim(folder, 0).token, reader)
        os.close(reader)

    def test_the_first_failure_of_any_rank_is_the_reason(
        self, folder: RunFolder, attempt: LiveAttempt
    ) -> None:
        folder.failures.mkdir()
        for rank, (after, why) in enumerate(
            [(2, "second"), (1, "first"), (-999, "an earlier attempt's")]
        ):
            word = {"time": time.time() + after, "reason": why, "error": "trace"}
            (folder.failures / f"rank_{rank}.json").write_text(json.dumps(word))
        (folder.failures / "rank_9.json").write_text("{ torn")
        attempt.wait(1)
        assert attempt.over
        attempt.ensure_run_ended()
        attempt.ensure_run_ended()
        assert [
            (e.status, e.reason, e.error)
            for e in read_all(folder.events)
            if isinstance(e, RunEnded)
        ] == [("FAILED", "first", "trace")]

    def test_what_rank_0_said_stands(self, folder: RunFolder) -> None:
        reader, writer = os.pipe()
        append(folder, started(), ended("FAILED", "of an earlier attempt"))
        attempt = LiveAttempt(folder, 0, run_locks.claim(folder, 0).token, reader)
        attempt.wait(0)
        assert not attempt.over
        append(folder, started(2), ended("KILLED", "time limit"))
        attempt.wait(0)
        assert attempt.over  # though the pipe is open: a notebook lives on
        attempt.ensure_run_ended()
        assert last(folder).reason == "time limit"
        os.close(reader)
        os.close(writer)

    def test_a_torn_last_line_is_closed_off(self, folder: RunFolder, attempt: LiveAttempt) -> None:
        append(folder, started())
        with folder.events.open("a") as file:
            file.write('{"event":"StepsLogged","steps":[1')
        attempt.wait(1)
        attempt.ensure_run_ended()
        assert last(folder).status == "FAILED"

    def test_an_older_attempt_says_nothing(self, folder: RunFolder, attempt: LiveAttempt) -> None:
        assert attempt.is_latest
        run_locks.claim(folder, 0)
        attempt.wait(1)
        attempt.ensure_run_ended()
        assert not attempt.is_latest
        assert not folder.events.exists()

    def test_an_attempt_that_begins_while_a_slow_disk_syncs_is_not_given_an_end(
        self, folder: RunFolder, attempt: LiveAttempt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        append(folder, started())
        folder.pictures.mkdir()
        (folder.pictures / "step_00000001.npz").touch()
        monkeypatch.setattr(disk, "sync_all", lambda *_: run_locks.claim(folder, 0))
        attempt.wait(1)
        attempt.ensure_run_ended()
        assert not any(isinstance(event, RunEnded) for event in read_all(folder.events))

    def test_another_run_of_the_same_name_is_not_given_an_end(
        self, folder: RunFolder, attempt: LiveAttempt
    ) -> None:
        identity = folder.identity
        folder.path.rename(folder.path.with_name("elsewhere"))
        assert attempt.is_latest
        RunFolder.create(folder.path.parent, identity)
        assert not attempt.is_latest
        attempt.wait(1)
        attempt.ensure_run_ended()
        assert not folder.events.exists()


def test_living_writer_is_distinguished_from_a_dead_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert not run_locks.writer_lives(folder)
    code = (
        f"from rankzero.run_store import run_locks, folder; from pathlib import Path; "
        f"run_locks.claim(folder.RunFolder(Path({str(folder.path)!r})), 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not run_locks.writer_lives(folder)
    run_locks.claim(folder, 0)
    assert run_locks.writer_lives(folder)


def test_one_process_holds_the_delivery_lock(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with (
        run_locks.lock(folder, 0) as first,
        run_locks.lock(folder, 0) as second,
        run_locks.lock(folder, 1) as other,
    ):
        assert (first, second, other) == (True, False, True)
        assert run_locks.is_recording(folder)
    assert not run_locks.is_recording(folder)


@pytest.mark.parametrize("recorder_is_dead", [False, True])
def test_forked_child_closes_the_pipe(recorder_is_dead: bool) -> None:
    reader, writer = os.pipe()
    kept = RecorderHandle(os.getpid(), writer)
    if recorder_is_dead:
        recorder._reap()  # As for a dead recorder, because no child has this process id.
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    kept.close()
    readable, _, _ = select.select([reader], [], [], 2)
    assert readable
    assert os.read(reader, 1) == b""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)


def test_parent_delivers_a_child_only_while_it_lives(tmp_path: Path) -> None:
    parent = make_folder(tmp_path, name="parent")
    child = make_folder(tmp_path, name="child", parent="parent")
    assert not recorder._delivered_by_parent(child), "as when `rankzero resume` launches it"
    run_locks.claim(parent, 0)
    assert recorder._delivered_by_parent(child)
    append(parent, started(), dataclasses.replace(ended(), time=time.time()))
    run_locks.claim(child, 0)
    assert not recorder._delivered_by_parent(child), "as in a notebook, whose process lives on"
    append(parent, dataclasses.replace(ended(), time=time.time()))
    assert recorder._delivered_by_parent(child), "it began before its parent's end"

"""A courier that gets no processor is given more of one: a little during the training, a fair share after it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankzero.events import RunEnded
from rankzero.run_store import attempt as attempts
from rankzero.run_store import claims, delivery_state
from rankzero.run_store.attempt import LiveAttempt
from rankzero.run_store.delivery_state import DeliveryState
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.tracking import courier as module
from rankzero.tracking import courier_supervisor as supervisor
from rankzero.tracking import recorder, retry
from rankzero.tracking.courier import MODEST
from rankzero.tracking.courier_supervisor import FAIR, UNWANTED, CourierSupervisor
from support.runs import append, make_folder
from support.runs import started as begun

IDLE_SECONDS = 0.3
ASLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


class Couriers:
    """What is started in the place of couriers: processes that do nothing."""

    def __init__(self) -> None:
        self.nice: list[int] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], **_: Any) -> subprocess.Popen[bytes]:
        self.nice.append(int(command[command.index("--nice") + 1]))
        self.processes.append(_real_popen(ASLEEP))
        return self.processes[-1]


_real_popen = subprocess.Popen


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Couriers]:
    made = Couriers()
    monkeypatch.setattr(supervisor, "IDLE_SECONDS", IDLE_SECONDS)
    monkeypatch.setattr(supervisor.subprocess, "Popen", made.start)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path)


@pytest.fixture
def courier(folder: RunFolder, started: Couriers) -> CourierSupervisor:
    made = CourierSupervisor(LiveAttempt(folder, 0, claims.claim(folder, 0).token))
    made.tend()
    return made


def tended(courier: CourierSupervisor, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert courier.tend()
        time.sleep(0.02)


def says(folder: RunFolder, error: str | None = None) -> None:
    delivery_state.save(delivery_state.path_of(folder, 0), DeliveryState(error=error))


def test_one_that_never_gets_to_begin_is_started_anew_with_a_little(
    courier: CourierSupervisor, started: Couriers
) -> None:
    tended(courier, 4 * IDLE_SECONDS)
    assert started.nice == [UNWANTED, MODEST]


def test_one_that_has_begun_is_left_alone_during_the_training(
    courier: CourierSupervisor, started: Couriers, folder: RunFolder
) -> None:
    says(folder)
    tended(courier, 4 * IDLE_SECONDS)
    assert started.nice == [UNWANTED]


def test_one_that_cannot_end_is_started_anew_with_a_fair_share(
    courier: CourierSupervisor, started: Couriers, folder: RunFolder
) -> None:
    says(folder)
    courier.finish()
    tended(courier, 0.5 * IDLE_SECONDS)
    assert started.nice == [UNWANTED]
    tended(courier, 4 * IDLE_SECONDS)
    assert started.nice == [UNWANTED, FAIR]


def test_one_that_gets_on_or_whose_mlflow_is_away_is_left_alone(
    courier: CourierSupervisor, started: Couriers, folder: RunFolder
) -> None:
    courier.finish()
    for _ in range(6):
        says(folder)
        tended(courier, 0.7 * IDLE_SECONDS)
    says(folder, error="ConnectionError: refused")
    tended(courier, 4 * IDLE_SECONDS)
    assert started.nice == [UNWANTED]


def test_one_whose_run_is_gone_is_not_started_anew(
    courier: CourierSupervisor, started: Couriers, folder: RunFolder
) -> None:
    folder.path.rename(folder.path.with_name("elsewhere"))
    courier.finish()
    tended(courier, 4 * IDLE_SECONDS)
    assert started.nice == [UNWANTED]


def test_one_that_has_done_nothing_yet_makes_way_for_a_newer_attempts(
    courier: CourierSupervisor, started: Couriers, folder: RunFolder
) -> None:
    claims.claim(folder, 0)
    tended(courier, 0.1)
    assert started.processes[0].poll() is None, "whether it is in vain, its recorder says"
    courier.finish()
    assert not courier.tend()
    assert started.processes[0].poll() is not None and len(started.processes) == 1


def test_one_that_has_begun_may_end_by_itself_when_a_newer_attempt_begins(
    courier: CourierSupervisor, started: Couriers, folder: RunFolder
) -> None:
    time.sleep(0.01)
    says(folder)
    claims.claim(folder, 0)
    courier.finish()
    assert courier.tend() and started.processes[0].poll() is None


def test_one_whose_right_is_held_for_long_is_waited_for_from_the_end_on(
    started: Couriers, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.5")
    with claims.lock(folder, 0):
        waiting = CourierSupervisor(LiveAttempt(folder, 0, claims.claim(folder, 0).token))
        time.sleep(0.6)  # a training that is longer than the grace
        waiting.finish()
        assert waiting.tend()
    assert waiting.tend() and len(started.processes) == 1


def test_none_is_started_for_an_attempt_that_waited_for_the_right_until_it_was_over(
    started: Couriers, folder: RunFolder
) -> None:
    with claims.lock(folder, 0):
        waiting = CourierSupervisor(LiveAttempt(folder, 0, claims.claim(folder, 0).token))
        assert waiting.tend()
        claims.claim(folder, 0)
    waiting.finish()
    assert not waiting.tend() and not started.processes


class TestFailingCalls:
    """One failed system call ends nothing: it is made again."""

    @pytest.fixture(autouse=True)
    def hurry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervisor, "PAUSE_SECONDS", 0.02)
        monkeypatch.setattr(retry, "PAUSE_SECONDS", 0.02)
        monkeypatch.setattr(supervisor, "IDLE_SECONDS", 60.0)
        monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.3")

    def test_where_no_process_can_be_made_it_is_tried_again(
        self,
        courier: CourierSupervisor,
        started: Couriers,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        started.processes[0].kill()
        started.processes[0].wait()
        monkeypatch.setattr(
            supervisor.subprocess, "Popen", failing(BlockingIOError(errno.EAGAIN, "no process"))
        )
        tended(courier, 0.3)
        assert caplog.text.count("cannot be tended") == 1
        monkeypatch.setattr(supervisor.subprocess, "Popen", started.start)
        tended(courier, 0.1)
        assert len(started.processes) == 2 and started.processes[1].poll() is None
        assert caplog.text.count("the courier ended with") == 1

    def test_a_lock_that_cannot_be_made_is_waited_for_until_the_grace_is_over(
        self, folder: RunFolder, started: Couriers
    ) -> None:
        (folder.path / "recorder.lock").symlink_to("nowhere")
        waiting = CourierSupervisor(LiveAttempt(folder, 0, claims.claim(folder, 0).token))
        tended(waiting, 0.5)
        waiting.finish()
        tended(waiting, 0.1)
        time.sleep(0.3)
        assert not waiting.tend() and not started.processes

    def test_what_is_to_end_the_process_does(
        self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(supervisor.subprocess, "Popen", failing(SystemExit()))
        with pytest.raises(SystemExit):
            CourierSupervisor(LiveAttempt(folder, 0, claims.claim(folder, 0).token)).tend()

    def test_a_dead_rank_0_is_seen_and_its_end_said_once_the_disk_is_back(
        self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader, writer = os.pipe()
        attempt = LiveAttempt(folder, 0, claims.claim(folder, 0).token, reader)
        append(folder, begun())
        real, stale = attempts.read, [OSError(errno.ESTALE, "stale")] * 4

        def read(*arguments: Any) -> Any:
            if stale:
                raise stale.pop()
            return real(*arguments)

        monkeypatch.setattr(attempts, "read", read)
        os.close(writer)
        recorder._follow(attempt, None)
        assert attempt.over and len(stale) == 3
        recorder._finish(attempt, None)
        [end] = [event for event in read_all(folder.events) if isinstance(event, RunEnded)]
        assert end.status == "FAILED" and not stale
        os.close(reader)

    def test_a_journal_that_cannot_be_read_is_read_again_without_haste(
        self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        reader, writer = os.pipe()
        attempt = LiveAttempt(folder, 0, claims.claim(folder, 0).token, reader)
        monkeypatch.setattr(attempts, "read", failing(OSError(errno.EIO, "input/output")))
        monkeypatch.setattr(module, "TICK_SECONDS", 0.0)
        monkeypatch.setattr(retry, "PAUSE_SECONDS", 0.1)
        threading.Timer(0.5, os.close, [writer]).start()
        recorder._follow(attempt, None)
        assert 2 <= caplog.text.count("unexpected; trying again") <= 7
        os.close(reader)

    def test_the_courier_says_the_end_once_that_can_be_done(
        self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader, writer = os.pipe()
        os.close(writer)
        attempt = LiveAttempt(folder, 0, claims.claim(folder, 0).token, reader)
        tries: list[int] = []

        def say() -> None:
            tries.append(1)
            if len(tries) < 3:
                raise OSError(errno.ENOSPC, "no space")

        monkeypatch.setattr(attempt, "ensure_run_ended", say)
        monkeypatch.setattr(module, "_come_forward", lambda: None)
        monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
        module.deliver_attempt(attempt, Delivered(), reader)  # type: ignore[arg-type]
        assert len(tries) == 3
        os.close(reader)


def failing(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


class Delivered:
    """A deliverer with nothing left to do."""

    complete = True

    def work(self) -> bool:
        return False

    def hasten(self) -> None: ...

    def commit(self) -> None: ...

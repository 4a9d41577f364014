"""The courier, and the supervisor that keeps it alive."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankzero.events import RunEnded
from rankzero.run_store import delivery_state, journal, run_locks
from rankzero.run_store.attempt import LiveAttempt
from rankzero.run_store.delivery_state import DeliveryState
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.tracking import recorder
from rankzero.tracking.courier import deliver_attempt
from rankzero.tracking.courier_supervisor import MOST_DEATHS, CourierSupervisor
from rankzero.tracking.throttle import ProcessorTime
from rankzero.tracking.trial_deliverers import TrialDeliverers
from support.memory_store import MemoryStore, deliverer_to
from support.runs import append, ended, make_folder, steps
from support.runs import started as begun

PAUSE_SECONDS = 0.02
ASLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


class Couriers:
    """Processes in the place of couriers: they do nothing."""

    def __init__(self) -> None:
        self.idle: list[bool] = []
        self.behind: list[float] = []
        self.error: BaseException | None = None
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], **_: Any) -> subprocess.Popen[bytes]:
        if self.error is not None:
            raise self.error
        self.idle.append("--idle" in command)
        if "--behind" in command:
            self.behind.append(float(command[command.index("--behind") + 1]))
        self.processes.append(subprocess.Popen(ASLEEP))
        return self.processes[-1]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def started() -> Iterator[Couriers]:
    made = Couriers()
    yield made
    made.kill()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path)


@pytest.fixture
def reader() -> Iterator[int]:
    """The recorder's or the courier's end of a pipe that rank 0 has closed."""
    found, writer = os.pipe()
    os.close(writer)
    yield found
    os.close(found)


@pytest.fixture
def courier(folder: RunFolder, started: Couriers) -> CourierSupervisor:
    made = supervisor(folder, started)
    made.tend()
    return made


def supervisor(folder: RunFolder, started: Couriers, **changes: Any) -> CourierSupervisor:
    return CourierSupervisor(
        LiveAttempt(folder, 0, run_locks.claim(folder, 0).token),
        pause_seconds=PAUSE_SECONDS,
        spawn=started.start,
        **changes,
    )


def tended(courier: CourierSupervisor, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert courier.tend()
        time.sleep(0.02)


def says(folder: RunFolder) -> None:
    delivery_state.save(delivery_state.path_of(folder, 0), DeliveryState())


def starving(
    folder: RunFolder,
    started: Couriers,
    share: float,
    is_crowded: Callable[[], bool] = lambda: False,
) -> CourierSupervisor:
    """Supervise a courier that waits for a processor and gets this share of one."""
    began = time.monotonic()

    def processor_time(_process: int) -> ProcessorTime:
        passed = time.monotonic() - began
        return ProcessorTime(share * passed, (1.0 - share) * passed)

    return CourierSupervisor(
        LiveAttempt(folder, 0, run_locks.claim(folder, 0).token),
        starving_seconds=(0.3, 0.1),
        crowded_seconds=0.1,
        spawn=started.start,
        processor_time=processor_time,
        is_crowded=is_crowded,
    )


def test_courier_that_starves_is_replaced_once_by_one_of_normal_priority(
    folder: RunFolder, started: Couriers
) -> None:
    courier = starving(folder, started, share=0.01)
    tended(courier, 0.2)
    assert started.idle == [True]
    tended(courier, 1.0)
    assert started.idle == [True, False] and started.processes[0].poll() is not None


def test_courier_that_starves_among_many_processes_is_replaced_sooner(
    folder: RunFolder, started: Couriers
) -> None:
    crowd = iter([False])
    tended(starving(folder, started, 0.01, lambda: next(crowd, True)), 0.25)
    assert started.idle == [True, False]
    assert started.behind == [pytest.approx(0.15, abs=0.1)], "it need not wait once more"


def test_courier_that_starts_among_many_processes_does_not_wait_for_idle_time(
    folder: RunFolder, started: Couriers
) -> None:
    starving(folder, started, 0.01, lambda: True).tend()
    assert started.idle == [False]


def test_courier_that_gets_a_part_of_a_processor_is_not_replaced(
    folder: RunFolder, started: Couriers
) -> None:
    tended(starving(folder, started, share=0.1), 0.8)
    assert started.idle == [True]


def test_courier_that_progresses_is_not_replaced(folder: RunFolder, started: Couriers) -> None:
    courier = starving(folder, started, share=0.0)
    for _ in range(6):
        says(folder)
        tended(courier, 0.15)
    assert started.idle == [True]


def test_courier_that_starves_after_the_training_gets_a_normal_priority(
    folder: RunFolder, started: Couriers
) -> None:
    courier = starving(folder, started, share=0.0)
    courier.tend()
    first = started.processes[0].pid
    os.sched_setscheduler(first, os.SCHED_IDLE, os.sched_param(0))
    courier.finish()
    tended(courier, 0.4)
    # Without the right to raise a priority, another courier takes its place.
    assert started.idle == [True, False] or os.sched_getscheduler(first) == os.SCHED_OTHER


def test_idle_courier_is_killed_for_a_newer_attempt(
    courier: CourierSupervisor, started: Couriers, folder: RunFolder
) -> None:
    run_locks.claim(folder, 0)
    tended(courier, 0.1)
    assert started.processes[0].poll() is None, "whether it is in vain, its recorder says"
    courier.finish()
    assert not courier.tend()
    assert started.processes[0].poll() is not None and len(started.processes) == 1


def test_working_courier_is_not_killed_for_a_newer_attempt(
    courier: CourierSupervisor, started: Couriers, folder: RunFolder
) -> None:
    time.sleep(0.01)
    says(folder)
    run_locks.claim(folder, 0)
    courier.finish()
    assert courier.tend() and started.processes[0].poll() is None


def test_lock_is_waited_for_during_the_grace_after_the_end(
    started: Couriers, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.5")
    with run_locks.lock(folder, 0):
        waiting = supervisor(folder, started)
        time.sleep(0.6)  # a training that is longer than the grace
        waiting.finish()
        assert waiting.tend()
    assert waiting.tend() and len(started.processes) == 1


def test_no_courier_is_started_for_an_outdated_attempt_that_waited_for_the_lock(
    started: Couriers, folder: RunFolder
) -> None:
    with run_locks.lock(folder, 0):
        waiting = supervisor(folder, started)
        assert waiting.tend()
        run_locks.claim(folder, 0)
    waiting.finish()
    assert not waiting.tend() and not started.processes


def test_courier_that_dies_again_and_again_is_restarted_after_pauses(
    folder: RunFolder, started: Couriers
) -> None:
    courier = supervisor(folder, started)
    courier.finish()
    began = time.monotonic()
    while courier.tend():
        started.kill()
    assert len(started.processes) == MOST_DEATHS and not courier.tend()
    assert time.monotonic() - began > (0 + 1 + 3 + 7) * PAUSE_SECONDS


def test_courier_is_restarted_as_long_as_the_training_runs_and_once_after_it(
    folder: RunFolder, started: Couriers
) -> None:
    courier = supervisor(folder, started)
    while len(started.processes) <= MOST_DEATHS:
        assert courier.tend()
        started.kill()
    assert courier.tend()
    courier.finish()
    while courier.tend():
        started.kill()
    assert len(started.processes) == MOST_DEATHS + 2


def test_couriers_that_die_after_long_work_are_always_restarted(
    folder: RunFolder, started: Couriers
) -> None:
    courier = supervisor(folder, started, steady_seconds=0.0)
    for count in range(1, 2 * MOST_DEATHS):
        assert courier.tend() and len(started.processes) == count
        delivery_state.save(delivery_state.path_of(folder, 0), DeliveryState())
        started.processes[-1].kill()
        started.processes[-1].wait()


def test_courier_that_waits_for_mlflow_is_behind(folder: RunFolder, reader: int) -> None:
    append(folder, begun(), steps(1, 3), ended())
    tracker, idle = MemoryStore(), []
    tracker.fail = failing(ConnectionError("away"))
    deliverer = deliverer_to(tracker, folder)

    def noted() -> None:
        idle.append(deliverer.state.retries.error)

    def recover() -> None:
        tracker.fail = lambda name, argument: None

    threading.Timer(0.2, recover).start()
    deliver_attempt(
        LiveAttempt(folder, 0, run_locks.claim(folder, 0).token, reader),
        deliverer,
        TrialDeliverers(folder),
        reader,
        tick_seconds=0.01,
        on_idle=noted,
    )
    assert deliverer.complete and deliverer.state.retries.failures > 1
    assert idle and not any(idle)


def test_courier_connects_without_the_packages_that_it_does_not_need(tmp_path: Path) -> None:
    code = (
        "import gc, sys; from rankzero.tracking.open_run import connect; "
        f"connect('sqlite:///{tmp_path}/mlflow.db'); "
        "assert gc.isenabled(); "
        "print([name in sys.modules for name in ('numpy', 'pandas', 'pyarrow', 'pygments')]); "
        "import pandas, pygments, mlflow; print(mlflow.MlflowClient.__name__, pandas.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    loaded, used = done.stdout.splitlines()
    assert loaded == str([False] * 4) and used == "MlflowClient pandas", done.stderr


def test_courier_accepts_what_an_earlier_recorder_passes(folder: RunFolder, reader: int) -> None:
    words = [str(folder.path), "--token", "of an older attempt", "--node", "1", "--nice", "19"]
    # In a process of its own: it changes its scheduling.
    command = [sys.executable, "-m", "rankzero.tracking.courier", *words, "--pipe", str(reader)]
    subprocess.run(command, pass_fds=[reader], check=True)


def test_courier_may_open_files_for_a_thousand_trials(folder: RunFolder, reader: int) -> None:
    code = (
        "import resource, sys; from rankzero.tracking import courier; "
        "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, most)); courier.main(sys.argv[1:]); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(most % 2**63, 65536))"
    )
    words = [str(folder.path), "--token", "older", "--node", "1", "--pipe", str(reader)]
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, pass_fds=[reader], check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"


class TestFailingCalls:
    """One failed system call ends nothing: it is made again."""

    @pytest.fixture(autouse=True)
    def hurry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.3")

    def test_starting_the_courier_is_retried_after_an_error(
        self, folder: RunFolder, started: Couriers, caplog: pytest.LogCaptureFixture
    ) -> None:
        courier = supervisor(folder, started)
        courier.tend()
        started.processes[0].kill()
        started.processes[0].wait()
        started.error = BlockingIOError(errno.EAGAIN, "no process")
        tended(courier, 0.3)
        assert caplog.text.count("cannot be tended") == 1
        started.error = None
        tended(courier, 0.1)
        assert len(started.processes) == 2 and started.processes[1].poll() is None
        assert caplog.text.count("the courier ended with") == 1

    def test_lock_that_cannot_be_created_is_retried_until_the_grace_is_over(
        self, folder: RunFolder, started: Couriers
    ) -> None:
        (folder.path / "recorder.lock").symlink_to("nowhere")
        waiting = supervisor(folder, started)
        tended(waiting, 0.5)
        waiting.finish()
        tended(waiting, 0.1)
        time.sleep(0.3)
        assert not waiting.tend() and not started.processes

    def test_system_exit_is_not_caught(self, folder: RunFolder, started: Couriers) -> None:
        started.error = SystemExit()
        with pytest.raises(SystemExit):
            supervisor(folder, started).tend()

    def test_end_of_dead_rank_0_is_written_once_the_disk_is_back(self, folder: RunFolder) -> None:
        reader, writer = os.pipe()
        append(folder, begun())
        stale = [OSError(errno.ESTALE, "stale")] * 4

        def read(*arguments: Any) -> Any:
            if stale:
                raise stale.pop()
            return journal.read(*arguments)

        attempt = LiveAttempt(folder, 0, run_locks.claim(folder, 0).token, reader, read)
        os.close(writer)
        recorder.follow(attempt, None, pause_seconds=PAUSE_SECONDS)
        assert attempt.over and len(stale) == 3
        recorder.finish(attempt, None, pause_seconds=PAUSE_SECONDS)
        [end] = [event for event in read_all(folder.events) if isinstance(event, RunEnded)]
        assert end.status == "FAILED" and not stale
        os.close(reader)

    def test_unreadable_journal_is_retried_with_pauses(
        self, folder: RunFolder, caplog: pytest.LogCaptureFixture
    ) -> None:
        reader, writer = os.pipe()
        broken = failing(OSError(errno.EIO, "input/output"))
        attempt = LiveAttempt(folder, 0, run_locks.claim(folder, 0).token, reader, broken)
        threading.Timer(0.5, os.close, [writer]).start()
        recorder.follow(attempt, None, tick_seconds=0.0, pause_seconds=0.1)
        assert 2 <= caplog.text.count("unexpected error; trying again") <= 7
        os.close(reader)

    def test_courier_writes_the_end_once_the_disk_has_room(
        self, folder: RunFolder, reader: int
    ) -> None:
        append(folder, begun())
        tries: list[int] = []

        def read(*arguments: Any) -> Any:
            tries.append(1)
            if len(tries) < 3:
                raise OSError(errno.ENOSPC, "no space")
            return journal.read(*arguments)

        attempt = LiveAttempt(folder, 0, run_locks.claim(folder, 0).token, reader, read)
        deliver_attempt(
            attempt,
            deliverer_to(MemoryStore(), folder),
            TrialDeliverers(folder),
            reader,
            tick_seconds=0.01,
            pause_seconds=PAUSE_SECONDS,
        )
        [end] = [event for event in read_all(folder.events) if isinstance(event, RunEnded)]
        assert end.status == "FAILED" and len(tries) >= 3


def test_courier_ends_although_a_full_disk_has_cut_the_last_sample(
    folder: RunFolder, reader: int
) -> None:
    append(folder, begun())
    folder.system(0).write_text('{"event": "SystemSam')
    attempt = LiveAttempt(folder, 0, run_locks.claim(folder, 0).token, reader)
    deliverer = deliverer_to(MemoryStore(), folder)
    deliver_attempt(
        attempt,
        deliverer,
        TrialDeliverers(folder),
        reader,
        tick_seconds=0.01,
    )
    assert deliverer.complete and deliverer.state.problems.rejected == 1


def test_courier_ends_the_line_in_which_rank_0_died_after_its_end(
    folder: RunFolder, reader: int
) -> None:
    claims = (
        "import sys; from pathlib import Path; from rankzero.run_store import run_locks; "
        "from rankzero.run_store.folder import RunFolder; "
        "print(run_locks.claim(RunFolder(Path(sys.argv[1])), 0).token)"
    )
    words = [sys.executable, "-c", claims, str(folder.path)]
    token = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    append(folder, begun(), ended())
    with folder.events.open("a") as file:
        file.write('{"event": "Noti')
    deliverer = deliverer_to(store := MemoryStore(), folder)
    attempt = LiveAttempt(folder, 0, token, reader)
    deliver_attempt(attempt, deliverer, TrialDeliverers(folder), reader, tick_seconds=0.01)
    assert deliverer.complete and store.status == "FINISHED"


def failing(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail

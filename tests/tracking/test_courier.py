"""A courier that gets no processor is given more of one: a little during the training, a fair share after it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankzero.tracking import courier as module
from rankzero.tracking import incumbent, progress
from rankzero.tracking.attempt import Attempt
from rankzero.tracking.courier import FAIR, MODEST, UNWANTED, Courier
from rankzero.tracking.folder import RunFolder
from rankzero.tracking.progress import Progress
from tracking.runs import make_folder

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
    monkeypatch.setattr(module, "IDLE_SECONDS", IDLE_SECONDS)
    monkeypatch.setattr(module.subprocess, "Popen", made.start)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path)


@pytest.fixture
def courier(folder: RunFolder, started: Couriers) -> Courier:
    made = Courier(Attempt(folder, 0, incumbent.claim(folder, 0).token))
    made.tend()
    return made


def tended(courier: Courier, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert courier.tend()
        time.sleep(0.02)


def says(folder: RunFolder, error: str | None = None) -> None:
    progress.save(progress.path_of(folder, 0), Progress(error=error))


def test_one_that_never_gets_to_begin_is_started_anew_with_a_little(courier: Courier, started: Couriers) -> None:
    tended(courier, 4 * IDLE_SECONDS)
    assert started.nice == [UNWANTED, MODEST]


def test_one_that_has_begun_is_left_alone_during_the_training(
    courier: Courier, started: Couriers, folder: RunFolder
) -> None:
    says(folder)
    tended(courier, 4 * IDLE_SECONDS)
    assert started.nice == [UNWANTED]


def test_one_that_cannot_end_is_started_anew_with_a_fair_share(
    courier: Courier, started: Couriers, folder: RunFolder
) -> None:
    says(folder)
    courier.finish()
    tended(courier, 0.5 * IDLE_SECONDS)
    assert started.nice == [UNWANTED]
    tended(courier, 4 * IDLE_SECONDS)
    assert started.nice == [UNWANTED, FAIR]


def test_one_that_gets_on_or_whose_mlflow_is_away_is_left_alone(
    courier: Courier, started: Couriers, folder: RunFolder
) -> None:
    courier.finish()
    for _ in range(6):
        says(folder)
        tended(courier, 0.7 * IDLE_SECONDS)
    says(folder, error="ConnectionError: refused")
    tended(courier, 4 * IDLE_SECONDS)
    assert started.nice == [UNWANTED]


def test_one_whose_run_is_gone_is_not_started_anew(courier: Courier, started: Couriers, folder: RunFolder) -> None:
    folder.path.rename(folder.path.with_name("elsewhere"))
    courier.finish()
    tended(courier, 4 * IDLE_SECONDS)
    assert started.nice == [UNWANTED]


def test_one_that_has_done_nothing_yet_makes_way_for_a_newer_attempts(
    courier: Courier, started: Couriers, folder: RunFolder
) -> None:
    incumbent.claim(folder, 0)
    tended(courier, 0.1)
    assert started.processes[0].poll() is None, "whether it is in vain, its recorder says"
    courier.finish()
    assert not courier.tend()
    assert started.processes[0].poll() is not None and len(started.processes) == 1


def test_one_that_has_begun_may_end_by_itself_when_a_newer_attempt_begins(
    courier: Courier, started: Couriers, folder: RunFolder
) -> None:
    time.sleep(0.01)
    says(folder)
    incumbent.claim(folder, 0)
    courier.finish()
    assert courier.tend() and started.processes[0].poll() is None


def test_one_whose_right_is_held_for_long_is_waited_for_from_the_end_on(
    started: Couriers, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.5")
    with incumbent.lock(folder, 0):
        waiting = Courier(Attempt(folder, 0, incumbent.claim(folder, 0).token))
        time.sleep(0.6)  # a training that is longer than the grace
        waiting.finish()
        assert waiting.tend()
    assert waiting.tend() and len(started.processes) == 1


def test_none_is_started_for_an_attempt_that_waited_for_the_right_until_it_was_over(
    started: Couriers, folder: RunFolder
) -> None:
    with incumbent.lock(folder, 0):
        waiting = Courier(Attempt(folder, 0, incumbent.claim(folder, 0).token))
        assert waiting.tend()
        incumbent.claim(folder, 0)
    waiting.finish()
    assert not waiting.tend() and not started.processes

"""The end of a rank's process."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero.errors import UserError
from rankzero.launch import failures
from rankzero.launch.failures import FailureKind
from rankzero.launch.request import JobRequest
from rankzero.ranks import Ranks
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.training import improvement, worker
from rankzero.training.build import build
from rankzero.training.distributed import device
from rankzero.training.distributed.world import World
from rankzero.training.stop import StopCode
from support.paths import FIXTURES
from support.two_ranks import layered


def rank_with_an_endless_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()
    worker._exit_in_time(7, seconds=0.1)


def test_a_thread_that_never_ends_does_not_keep_a_rank_alive() -> None:
    rank = multiprocessing.get_context("fork").Process(target=rank_with_an_endless_thread)
    rank.start()
    rank.join(60)
    assert rank.exitcode == 7


def test_rank_0_of_a_trial_alone_writes_its_beat(tmp_path: Path) -> None:
    folder, world = RunFolder(tmp_path), World(Ranks(), torch.device("cpu"))
    worker._beat_writer(request({}), world, folder)()
    assert not folder.beat.exists(), "nobody reads it"
    trial = dataclasses.replace(request({}), is_trial=True)
    worker._beat_writer(trial, dataclasses.replace(world, ranks=Ranks(1, 2)), folder)()
    assert not folder.beat.exists(), "it has one writer"
    worker._beat_writer(trial, world, folder)()
    assert folder.beat.exists()


def request(environment: dict[str, str]) -> JobRequest:
    return JobRequest("", "", "", Identity("", "", "", ""), environment, "")


def sleeps(_ranks: Ranks) -> torch.device:
    time.sleep(600)
    raise AssertionError


def test_a_driver_that_does_not_answer_ends_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "choose", sleeps)
    monkeypatch.setenv("RANKZERO_SETUP_SECONDS", "0.2")
    limits = "train: {limits: {hang_minutes: 0.0005}}"
    asked = dataclasses.replace(request({}), config=limits, failures=str(tmp_path))
    rank = multiprocessing.get_context("fork").Process(target=worker.main, args=(asked,))
    rank.start()
    rank.join(60)
    assert rank.exitcode == -signal.SIGKILL
    failure = failures.first(tmp_path)
    assert failure is not None and failure.kind == FailureKind.HANG
    assert re.match(r"rank 0 hung for 0 s in set-up \(.*, in sleeps\)", failure.reason)


def shows_variables(_ranks: Ranks) -> torch.device:
    raise UserError(f"{os.environ.get('NCCL_P2P_DISABLE')} {os.environ.get('OMP_NUM_THREADS')}")


@pytest.mark.parametrize(("is_trial", "seen"), [(False, "2 1"), (True, "1 1")])
def test_a_rank_joins_with_the_variables_that_the_file_has_set_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trial: bool, seen: str
) -> None:
    """It imports the file afterwards, and the run's tags say that they are in force."""
    names = ("NCCL_P2P_DISABLE", "OMP_NUM_THREADS")
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(device, "choose", shows_variables)
    asked = request({f"rankzero.env.{name}": "2" for name in names})
    asked = dataclasses.replace(asked, config="{}", failures=str(tmp_path), is_trial=is_trial)
    rank = multiprocessing.get_context("fork").Process(target=worker.main, args=(asked,))
    rank.start()
    rank.join(60)
    failure = failures.first(tmp_path)
    assert failure is not None and failure.reason.startswith(seen), failure


def test_a_stream_without_a_length_gives_notice_that_it_has_one_epoch() -> None:
    flowing: Any = layered(FIXTURES / "flowing.py", kind="stream", train__workers=0)

    class Thawing(type(flowing)):  # type: ignore[misc]
        def frozen(self, epoch: int) -> list[str]:
            return ["0"] if not epoch else []

    for kind, notices in ((type(flowing), 0), (Thawing, 1)):
        experiment = kind(train=flowing.train, kind="stream")
        job, state = build(experiment, World(Ranks(), torch.device("cpu")))
        data = {"training": job.train_loader.dataset}
        found = list(worker._notices(request({}), job, state, data))
        assert len(found) == notices and all("every step is of epoch 0" in one for one in found)


def test_a_goal_that_was_never_a_number_is_named(tmp_path: Path) -> None:
    job, state = build(layered(train__patience=3), World(Ranks(), torch.device("cpu")))
    for _ in range(3):
        improvement.add_evaluation(job.experiment, state, math.nan)
    ended = worker._outcome(job, state, StopCode.NONE, None, RunFolder(tmp_path))
    goal = job.experiment.goal.metric
    assert f"no better {goal} for 3 evaluations; trained 0 steps" in ended.reason
    assert ended.reason.endswith(f"; {goal} was never a number")


def test_what_the_optimizer_leaves_out_is_named_once() -> None:
    for probe, notices in (
        ("left out", ["0.weight, 0.bias, 2.weight and 3 more, so they are not trained"]),
        ("frozen", []),
        ("", []),
    ):
        experiment = layered(probe=probe)
        job, state = build(experiment, World(Ranks(), torch.device("cpu")))
        data = {"training": job.train_loader.dataset}
        found = list(worker._notices(request({}), job, state, data))
        assert found == [f"optimizer() leaves out {one}" for one in notices]

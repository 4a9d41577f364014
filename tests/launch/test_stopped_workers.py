"""Workers that stay stopped when another one has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import psutil
import pytest

from rankzero.launch import stopped_workers

LOOK_SECONDS = 0.05


@pytest.fixture
def workers() -> Iterator[list[BaseProcess]]:
    context = multiprocessing.get_context("fork")
    found: list[BaseProcess] = [context.Process(target=time.sleep, args=(600,)) for _ in range(2)]
    for worker in found:
        worker.start()
    yield found
    for worker in found:
        worker.kill()
        worker.join()


def follow(workers: list[BaseProcess], looks: int) -> threading.Thread:
    pids = [worker.pid or 0 for worker in workers]
    thread = threading.Thread(
        target=stopped_workers.kill_stopped, args=(pids, LOOK_SECONDS, looks), daemon=True
    )
    thread.start()
    return thread


def stop(worker: BaseProcess) -> None:
    os.kill(worker.pid or 0, signal.SIGSTOP)
    while psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def test_worker_that_is_stopped_when_another_has_ended_is_killed(
    workers: list[BaseProcess],
) -> None:
    stop(workers[1])
    thread = follow(workers, looks=3)
    thread.join(10 * LOOK_SECONDS)
    assert workers[1].is_alive(), "nobody has ended yet"
    workers[0].kill()
    workers[1].join(30)
    assert workers[1].exitcode == -signal.SIGKILL
    thread.join(30)
    assert not thread.is_alive()


def test_worker_that_continues_is_left_alone(workers: list[BaseProcess]) -> None:
    workers[0].kill()
    workers[0].join()
    thread = follow(workers, looks=1000)
    stop(workers[1])
    time.sleep(5 * LOOK_SECONDS)
    os.kill(workers[1].pid or 0, signal.SIGCONT)
    thread.join(5 * LOOK_SECONDS)
    assert thread.is_alive() and workers[1].is_alive()

"""A real host process, and how the search learns that a trial has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest

from rankzero.launch.agent import Topology
from rankzero.run_store.folder import RunFolder
from rankzero.tuning.trials.describe import Question
from rankzero.tuning.trials.host_process import LocalHost
from rankzero.tuning.trials.launcher import LaunchedTrial


def frozen(host: LocalHost) -> int:
    """Freeze a host. Return its process id once it stands still."""
    process = psutil.Process(host._process.pid)
    process.suspend()
    deadline = time.monotonic() + 20
    # Of two signals, the kernel delivers the lower number first: SIGQUIT would end the host.
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, process.status()
        time.sleep(0.01)
    return process.pid


def test_a_frozen_host_is_given_up_and_nobody_waits_for_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "t")
    folder.path.mkdir()
    with contextlib.closing(LocalHost(())) as host:
        host.run(time.sleep, Topology(1), 100, folder.path, folder.path)  # type: ignore[arg-type]
        frozen(host)
        trial = LaunchedTrial(folder, host)
        trial.kill("no sign of life")
        assert not host.has_ended()
        trial.give_up()
        assert trial.has_ended and trial.was_lost
        # The pool waits once more, and then asks for the trial's end.
        assert wait(trial.handles, 0.0) == []
        assert host.has_ended() and host.was_lost


def test_a_host_that_dies_before_it_reads_its_request_loses_the_trial(tmp_path: Path) -> None:
    with contextlib.closing(LocalHost(())) as host:
        pid = frozen(host)
        host.run(str, Topology(1), "unread", tmp_path, tmp_path)
        os.kill(pid, signal.SIGKILL)
        assert host.has_ended(20.0) and host.was_lost
        # It dies between the look at it and the request.
        host._process.join()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host._process, "is_alive", lambda: True)
            host.run(str, Topology(1), "refused", tmp_path, tmp_path)
        assert host.has_ended(20.0) and host.was_lost


def test_a_host_that_dies_before_it_describes_is_named() -> None:
    with contextlib.closing(LocalHost(())) as host:
        threading.Timer(0.5, os.kill, (frozen(host), signal.SIGKILL)).start()
        with pytest.raises(RuntimeError, match="the process that launches trials ended"):
            host.describe(Question("exp.py", {}, 1))


def test_a_host_that_is_closed_gets_the_signal_that_kills_its_ranks() -> None:
    sent = list[int]()
    for launches in (False, True):
        assert not sent, "a host without ranks needs none"
        host = LocalHost(())
        host._launches = launches
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "signal", sent.append)
            host.close()
    assert sent == [signal.SIGQUIT]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_host_loses_its_trial_and_the_next_trial_gets_another_host(
    tmp_path: Path,
) -> None:
    with contextlib.closing(LocalHost(())) as host:
        host.run(time.sleep, Topology(1), 100, tmp_path, tmp_path)  # type: ignore[arg-type]
        root = psutil.Process(host._process.pid)
        deadline = time.monotonic() + 100
        while not (tmp_path / "launcher.log").exists() and time.monotonic() < deadline:
            assert not host.has_ended(0.1)
        left = root.children(recursive=True)
        os.kill(root.pid, signal.SIGKILL)
        assert wait(host.handles, 20) and host.has_ended(5.0) and host.was_lost
        assert not psutil.wait_procs(left, 60)[1], "a rank outlived its host"
        host.run(str, Topology(1), "whole", tmp_path, tmp_path)
        assert wait(host.handles, 100) and host.has_ended() and not host.was_lost

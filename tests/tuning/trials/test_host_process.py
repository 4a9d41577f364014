"""A real host process, and how the search learns that a trial has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest

from rankzero.launch.agent import Topology
from rankzero.run_store.folder import RunFolder
from rankzero.tuning.trials.host_process import LocalHost
from rankzero.tuning.trials.launcher import LaunchedTrial


def test_a_frozen_host_is_given_up_and_nobody_waits_for_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "t")
    folder.path.mkdir()
    with contextlib.closing(LocalHost(())) as host:
        host.run(time.sleep, Topology(1), 100, folder.path, folder.path)  # type: ignore[arg-type]
        os.kill(host._process.pid or 0, signal.SIGSTOP)
        trial = LaunchedTrial(folder, host)
        trial.kill("no sign of life")
        assert not host.has_ended()
        trial.give_up()
        assert trial.has_ended and trial.was_lost
        # The pool waits once more, and then asks for the trial's end.
        assert wait(trial.handles, 0.0) == []
        assert host.has_ended() and host.was_lost


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

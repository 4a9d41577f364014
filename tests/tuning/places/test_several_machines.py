"""Trials of several machines, which only the addresses that they were given connect."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rankzero.errors import UserError
from rankzero.events import RunStarted
from rankzero.launch.agent import Topology
from rankzero.tuning.places.remote_host import RemoteHost
from rankzero.tuning.trials import describe
from rankzero.tuning.trials.follower import run_alone
from rankzero.tuning.trials.launcher import TrainLauncher
from support import srun_of_two
from support.commands import TINY, events, last_end, wait_until
from support.remote_trials import QUICK, assert_a_prune_stops_it, ended, launcher_for, run, started

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture
def host() -> Iterator[RemoteHost]:
    words = [sys.executable, srun_of_two.__file__]
    with contextlib.closing(RemoteHost(words, (), "a test", print, machines=2)) as found:
        yield found


@pytest.fixture
def launcher(host: RemoteHost, tmp_path: Path) -> TrainLauncher:
    topology = Topology(2, silence_seconds=60)
    return dataclasses.replace(launcher_for(host, tmp_path), topology=topology)


def test_machines_train_a_trial_together_and_stop_together(
    host: RemoteHost, launcher: TrainLauncher
) -> None:
    described = host.describe(describe.Question(str(TINY), QUICK, 1))
    assert (described.processes, described.machines) == (2, 2)
    experiment = describe.mirrored(described)
    # The second one must not join the ranks of the first.
    for name in ("first", "second"):
        assert run_alone(launcher, experiment, name).state == "COMPLETE"
        folder = run(launcher, name)
        begun = next(one for one in events(folder) if isinstance(one, RunStarted))
        assert begun.environment["rankzero.world_size"] == "2"

    assert_a_prune_stops_it(launcher, experiment)

    trial = started(launcher, experiment, "lost")
    # The trials before may be too short for a sample.
    samples = [run(launcher, "lost").system(number) for number in (0, 1)]
    wait_until(lambda: trial.new_events() is not None and all(one.exists() for one in samples))
    assert host._process is not None
    processes = psutil.Process(host._process.pid).children(recursive=True)
    second = next(one for one in processes if "--number=1" in one.cmdline())
    os.kill(second.pid, signal.SIGKILL)
    ended(trial)
    assert trial.was_lost and last_end(run(launcher, "lost")).status == "FAILED"
    assert not psutil.wait_procs(processes, 60)[1], "a process outlived the other machine"
    assert run_alone(launcher, experiment, "again").state == "COMPLETE"


def test_one_process_has_no_second_machine(host: RemoteHost) -> None:
    alone = {**QUICK, "train.strategy": "single"}
    with pytest.raises(UserError, match="strategy=single is one process"):
        host.describe(describe.Question(str(TINY), alone, 1))

"""A real host in a process that only its input and output connect with the search."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rankzero.errors import RunFailed, UserError
from rankzero.launch.agent import Topology
from rankzero.tuning.places.remote_host import RemoteHost
from rankzero.tuning.trials.follower import run_alone
from rankzero.tuning.trials.launcher import TrainLauncher, train
from support.commands import TINY, events, last_end
from support.remote_trials import (
    assert_the_next_trains_elsewhere,
    ended,
    launcher_for,
    run,
    started,
    tiny,
)

NODE = (sys.executable, "-m", "rankzero.tuning.places.node")


@pytest.fixture
def node_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of the other machine; its path is short, as sockets need it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture
def host(node_folder: Path) -> Iterator[RemoteHost]:
    with contextlib.closing(RemoteHost(NODE, (), f"a test in {node_folder}", print)) as found:
        yield found


@pytest.fixture
def launcher(tmp_path: Path, host: RemoteHost) -> TrainLauncher:
    return launcher_for(host, tmp_path)


@pytest.mark.timeout(300)
def test_trials_elsewhere_end_as_trials_here_do(
    host: RemoteHost, launcher: TrainLauncher, node_folder: Path
) -> None:
    experiment = tiny(host)
    whole = run_alone(launcher, experiment, "whole")
    assert whole.state == "COMPLETE" and whole.curve.points
    assert next(iter(events(run(launcher, "whole")))).environment["rankzero.host"]  # type: ignore[union-attr]

    trial = started(launcher, experiment, "pruned")
    trial.prune("cannot win")
    ended(trial)
    end = last_end(run(launcher, "pruned"))
    assert end.status == "KILLED" and end.reason.endswith(": cannot win") and not trial.was_lost

    trial = started(launcher, experiment, "hung")
    trial.kill("no sign of life")
    ended(trial)
    end = last_end(run(launcher, "hung"))
    assert (end.status, end.reason) == ("FAILED", "no sign of life")

    host.close()
    assert [path.name for path in node_folder.iterdir() if "rankzero" in path.name] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_machine_that_dies_loses_its_trial_and_the_next_one_trains_elsewhere(
    host: RemoteHost, launcher: TrainLauncher
) -> None:
    experiment = tiny(host)
    trial = started(launcher, experiment, "lost")
    assert host._process is not None
    node = psutil.Process(host._process.pid)
    left = node.children(recursive=True)
    os.kill(node.pid, signal.SIGKILL)
    assert_the_next_trains_elsewhere(launcher, experiment, trial, "lost")
    assert not psutil.wait_procs(left, 60)[1], "a rank outlived its host"


def test_a_command_that_waits_in_a_queue_ends_at_once(tmp_path: Path) -> None:
    host = RemoteHost(("sleep", "1000"), (), "a test", print)
    host.run(train, Topology(1), None, tmp_path / "logs", tmp_path)
    process, before = host._process, time.monotonic()
    assert host.is_starting and process is not None and process.poll() is None
    host.close()
    assert process.poll() == -signal.SIGTERM and time.monotonic() - before < 5


def test_a_command_that_starts_no_host_is_quoted() -> None:
    words = ("sh", "-c", "echo invalid partition: gpus >&2; exit 3")
    with (
        contextlib.closing(RemoteHost(words, (), "a test", print)) as host,
        pytest.raises(RunFailed, match="ended with 3: invalid partition: gpus"),
    ):
        host.describe(str(TINY), {}, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_that_waits_in_a_queue_is_announced_and_then_answers(node_folder: Path) -> None:
    queued, lines = ("sh", "-c", 'sleep 7; exec "$@"', node_folder.name, *NODE), list[str]()
    with contextlib.closing(RemoteHost(queued, (), "Slurm", lines.append)) as host:
        assert host.describe(str(TINY), {}, 1).name == "Tiny" and not host.is_starting
    assert lines == ["waiting for a machine of Slurm"]


@pytest.mark.slow
def test_an_experiment_that_the_other_machine_lacks_is_named(host: RemoteHost) -> None:
    with pytest.raises(UserError, match=r"no such experiment file: /nowhere/x.py.*all machines"):
        host.describe("/nowhere/x.py", {}, 1)

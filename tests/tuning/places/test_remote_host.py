"""A real host in a process that only its input and output connect with the search."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rankzero.config import override
from rankzero.errors import RunFailed, UserError
from rankzero.experiment import Experiment
from rankzero.launch.agent import Topology
from rankzero.launch.request import make_folder
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.tuning.places.remote_host import RemoteHost
from rankzero.tuning.trials import describe
from rankzero.tuning.trials.follower import run_alone
from rankzero.tuning.trials.launcher import LaunchedTrial, TrainLauncher
from support.commands import TINY, events, last_end, losses, wait_until

NODE = (sys.executable, "-m", "rankzero.tuning.places.node")
QUICK = {"train.epochs": "1"}
ENDLESS = {"train.steps": 100_000, "step_seconds": 0.02}


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
    uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    identity = Identity("study", "0" * 32, "tiny", uri, experiment_file=str(TINY))
    return TrainLauncher(host, make_folder(tmp_path / "runs", identity), Topology(1), {})


def tiny(host: RemoteHost) -> Experiment:
    return describe.mirrored(host.describe(str(TINY), QUICK, 1))


def started(launcher: TrainLauncher, experiment: Experiment, name: str) -> LaunchedTrial:
    """Start a trial, and wait until some steps of it have come over."""
    trial = launcher.start(override(experiment, ENDLESS), name)
    folder = RunFolder(launcher.study.path.parent / name)
    wait_until(lambda: trial.new_events() is not None and len(losses(folder)) > 5, 100)
    return trial


def ended(trial: LaunchedTrial) -> None:
    wait_until(lambda: trial.new_events() is not None and trial.has_ended, 100)
    trial.close()


@pytest.mark.timeout(300)
def test_trials_elsewhere_end_as_trials_here_do(
    host: RemoteHost, launcher: TrainLauncher, tmp_path: Path, node_folder: Path
) -> None:
    experiment = tiny(host)
    whole = run_alone(launcher, experiment, "whole")
    assert whole.state == "COMPLETE" and whole.curve.points
    folder = RunFolder(tmp_path / "runs" / "whole")
    assert next(iter(events(folder))).environment["rankzero.host"]  # type: ignore[union-attr]

    trial = started(launcher, experiment, "pruned")
    trial.prune("cannot win")
    ended(trial)
    end = last_end(RunFolder(tmp_path / "runs" / "pruned"))
    assert end.status == "KILLED" and end.reason.endswith(": cannot win") and not trial.was_lost

    trial = started(launcher, experiment, "hung")
    trial.kill("no sign of life")
    ended(trial)
    end = last_end(RunFolder(tmp_path / "runs" / "hung"))
    assert (end.status, end.reason) == ("FAILED", "no sign of life")

    host.close()
    assert [path.name for path in node_folder.iterdir() if "rankzero" in path.name] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_machine_that_dies_loses_its_trial_and_the_next_one_trains_elsewhere(
    host: RemoteHost, launcher: TrainLauncher, tmp_path: Path
) -> None:
    experiment = tiny(host)
    trial = started(launcher, experiment, "lost")
    assert host._process is not None
    node = psutil.Process(host._process.pid)
    left = node.children(recursive=True)
    os.kill(node.pid, signal.SIGKILL)
    ended(trial)
    assert trial.was_lost and last_end(RunFolder(tmp_path / "runs" / "lost")).status == "FAILED"
    assert run_alone(launcher, experiment, "again").state == "COMPLETE"
    assert not psutil.wait_procs(left, 60)[1], "a rank outlived its host"


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

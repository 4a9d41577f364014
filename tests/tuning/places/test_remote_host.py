"""A real host in a process that only its input and output connect with the search."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rankzero import experiment_file
from rankzero.config import override
from rankzero.errors import RunFailed, UserError
from rankzero.launch.agent import Topology
from rankzero.tuning.learning_curve import LearningCurve
from rankzero.tuning.objective import Objective
from rankzero.tuning.places.remote_host import RemoteHost
from rankzero.tuning.trials.describe import Question
from rankzero.tuning.trials.follower import TrialJob, TrialPool, TrialResult, run_alone
from rankzero.tuning.trials.launcher import TrainLauncher, train
from support.commands import TINY, events, last_end, wait_until
from support.remote_trials import (
    ENDLESS,
    assert_a_prune_stops_it,
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

    assert_a_prune_stops_it(launcher, experiment)

    trial = started(launcher, experiment, "hung")
    trial.kill("no sign of life")
    ended(trial)
    end = last_end(run(launcher, "hung"))
    assert (end.status, end.reason) == ("FAILED", "no sign of life")
    wait_until(lambda: not list(node_folder.glob("rankzero-node-*/*")), 20)

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


def test_a_queued_command_ends_with_a_search_that_is_killed(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from rankzero.launch.agent import Topology; "
        "from rankzero.tuning.places.remote_host import RemoteHost; "
        "from rankzero.tuning.trials.launcher import train; import time; "
        "host = RemoteHost(('sleep', '1000'), (), 'a test', print); "
        f"host.run(train, Topology(1), None, Path('{tmp_path}/logs'), Path('{tmp_path}')); "
        "print(host._process.pid, flush=True); time.sleep(1000)"
    )
    search = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert search.stdout is not None
    queued = psutil.Process(int(search.stdout.readline()))
    wait_until(lambda: queued.name() == "sleep", 10)
    search.kill()
    search.communicate()
    assert not psutil.wait_procs([queued], 10)[1]


def test_a_trial_whose_host_is_refused_ends_the_search_in_the_clusters_words(
    tmp_path: Path,
) -> None:
    """The other trials are closed all the same."""
    refused = RemoteHost(("sh", "-c", "echo limit reached >&2; exit 1"), (), "a test", print)
    queued = RemoteHost(("sleep", "1000"), (), "a test", print)
    results: list[TrialResult | None] = []
    launchers = [
        launcher_for(one, tmp_path / name) for one, name in ((queued, "q"), (refused, "r"))
    ]
    experiment = experiment_file.load(str(TINY))()
    objective = Objective("throughput", experiment.goal, None)
    jobs = [TrialJob(experiment, name, objective, results.append) for name in ("a", "b")]
    with pytest.raises(RunFailed, match="limit reached"):
        TrialPool(launchers).run_all(jobs)
    assert results == [None, None] and refused.handles == queued.handles == []
    refused.signal(signal.SIGTERM)
    refused.close()


SPEAKER = """
import os, sys, time
from pathlib import Path
from rankzero.tuning.places.messages import Change, Ended, Lines, Started
from importlib.metadata import version
lines = Lines(0, 1)
lines.send(Started("other", version("rankzero")))
for number in range(5):
    lines.send(Change("a.log", number, b"x"))
    time.sleep(0.1)
"""


def test_the_end_is_waited_for_while_a_journal_comes_over(tmp_path: Path) -> None:
    words = (sys.executable, "-c", f"{SPEAKER}\nlines.send(Ended(False)); sys.stdin.read()")
    with contextlib.closing(RemoteHost(words, (), "a test", print)) as host:
        host.run(train, Topology(1), None, tmp_path / "logs", tmp_path)
        assert not host.has_ended(0.0)
        assert host.has_ended(60.0) and not host.was_lost
        assert (tmp_path / "a.log").read_text() == "xxxxx"


def test_a_cluster_that_has_started_a_host_gets_more_tries(tmp_path: Path) -> None:
    """A machine that died may be chosen again until the cluster notices."""
    broken, lines = tmp_path / "broken", list[str]()
    code = (
        f"import sys; from pathlib import Path; broken = Path({str(broken)!r})\n"
        f"if broken.exists(): broken.unlink(); sys.exit('node failed')\n"
        f"{SPEAKER}\nlines.send(Ended(False)); sys.stdin.read()"
    )
    host = RemoteHost((sys.executable, "-c", code), (), "Slurm", lines.append, 1, (0.2, 0.2))
    with contextlib.closing(host):
        for is_broken in (False, True):
            broken.touch() if is_broken else None
            host.run(train, Topology(1), None, tmp_path / "logs", tmp_path)
            assert host.is_starting
            assert host.has_ended(60.0) and not host.was_lost
            host.close()
    assert len(lines) == 1 and lines[0].startswith("Slurm starts no host, tried again in 0 s: ")
    assert lines[0].endswith(": node failed")


def test_machines_that_train_on_without_the_others_are_a_lost_host(tmp_path: Path) -> None:
    """They wait for the others for ten minutes, and do not know why."""
    second = "lines.send(Started('second', version('rankzero'))); lines.send(Ended(False))"
    words, lines = (sys.executable, "-c", f"{SPEAKER}\n{second}; sys.stdin.read()"), list[str]()
    host = RemoteHost(words, (), "Slurm", lines.append, machines=2, last_seconds=0.5)
    with contextlib.closing(host):
        host.run(train, Topology(2), None, tmp_path / "logs", tmp_path)
        wait_until(lambda: host.has_ended(0.1), 60)
        assert host.was_lost and not host.is_starting
    assert lines[0].startswith("one of 2 machines of Slurm trained on without the others")


def test_a_lost_hosts_last_words_are_printed(tmp_path: Path) -> None:
    code, lines = f"{SPEAKER}\nprint('out of memory', file=sys.stderr); os._exit(9)", list[str]()
    with contextlib.closing(
        RemoteHost((sys.executable, "-c", code), (), "Slurm", lines.append)
    ) as host:
        host.run(train, Topology(1), None, tmp_path / "logs", tmp_path)
        assert host.has_ended(60.0) and host.was_lost
    assert len(lines) == 1 and lines[0].endswith("ended with 9: out of memory")


def test_a_command_that_starts_no_host_is_quoted() -> None:
    words = ("sh", "-c", "echo invalid partition: gpus >&2; exit 3")
    with (
        contextlib.closing(RemoteHost(words, (), "a test", print)) as host,
        pytest.raises(RunFailed, match="ended with 3: invalid partition: gpus"),
    ):
        host.describe(Question(str(TINY), {}, 1))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_with_room_for_one_host_runs_the_trials_of_two(
    node_folder: Path, tmp_path: Path
) -> None:
    """The first host gives its machine up once it has nothing to do."""
    one_at_a_time = ("flock", str(node_folder / "machine"), *NODE)
    hosts = [RemoteHost(one_at_a_time, (), "a test", print) for _ in range(2)]
    launchers = [launcher_for(host, tmp_path / str(n)) for n, host in enumerate(hosts)]
    results: list[TrialResult | None] = []
    experiment = tiny(hosts[0])
    objective = Objective("throughput", experiment.goal, None)
    jobs = [TrialJob(experiment, name, objective, results.append) for name in ("a", "b")]
    with contextlib.closing(hosts[0]), contextlib.closing(hosts[1]):
        TrialPool(launchers).run_all(jobs)
    assert [one and one.state for one in results] == ["COMPLETE", "COMPLETE"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_search_stops_its_trial_in_order(
    host: RemoteHost, launcher: TrainLauncher
) -> None:
    experiment = tiny(host)

    def ctrl_c(curve: LearningCurve) -> str:
        if curve.points:
            raise KeyboardInterrupt
        return ""

    results: list[TrialResult | None] = []
    objective = Objective("throughput", experiment.goal, None)
    endless = override(experiment, {**ENDLESS, "train.eval_every": 20})
    with pytest.raises(KeyboardInterrupt):
        TrialPool([launcher]).run_all(
            [TrialJob(endless, "stopped", objective, results.append, ctrl_c)]
        )
    end = last_end(run(launcher, "stopped"))
    assert results == [None] and (end.status, end.reason[:10]) == ("KILLED", "stopped by")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_that_waits_in_a_queue_is_announced_and_then_answers(node_folder: Path) -> None:
    queued, lines = ("sh", "-c", 'sleep 7; exec "$@"', node_folder.name, *NODE), list[str]()
    with contextlib.closing(RemoteHost(queued, (), "Slurm", lines.append)) as host:
        assert host.describe(Question(str(TINY), {}, 1)).name == "Tiny" and not host.is_starting
    assert lines == ["waiting for a machine of Slurm"]


@pytest.mark.slow
def test_an_experiment_that_the_other_machine_lacks_is_named(host: RemoteHost) -> None:
    with pytest.raises(UserError, match=r"no such experiment file: /nowhere/x.py.*all machines"):
        host.describe(Question("/nowhere/x.py", {}, 1))

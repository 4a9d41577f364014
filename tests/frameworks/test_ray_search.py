"""A search whose trials run in actors of a real Ray cluster."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from frameworks.examples import SECONDS, needs
from rankzero.errors import RESUMABLE
from rankzero.events import RunStarted
from rankzero.run_store.folder import RunFolder
from rankzero.tuning.options import default_storage
from rankzero.tuning.places import ray_actor
from rankzero.tuning.places.remote_host import RemoteHost
from rankzero.tuning.study import find_study
from support.commands import TINY, Command, events, tracked, wait_until
from support.ray_cluster import Cluster, nodes, of_ray, running
from support.remote_trials import (
    TIMELESS,
    assert_same_results,
    assert_the_next_trains_elsewhere,
    launcher_for,
    started,
    tiny,
)

pytestmark = pytest.mark.timeout(3 * SECONDS)


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else a token in the user's home, if any, counts for some of Ray's processes only.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    needs("ray")
    with running() as found:
        yield found


def search(address: str, *words: object) -> list[str]:
    options = ("--ray", address, "--name", "s", "--no-probe", "--seeds", "2")
    return ["search", str(TINY), *options, "--challengers", "1", *map(str, words)]


def test_a_search_whose_trials_are_in_actors(rankzero: Command, cluster: Cluster) -> None:
    cluster.add_machine()
    # All processors of a machine, else both hosts would be on the first.
    words = search(cluster.address, "--trials", 4, "--parallel", 2, "--", "num_cpus=2")
    code, printed = rankzero(*words)
    assert code == 0, printed
    assert "Your configuration" in printed or "Nothing beats" in printed
    study = find_study(default_storage(rankzero.folder / "mlruns"), "s")
    assert {one.state for one in study.trials()} <= {"COMPLETE", "PRUNED"}
    assert tracked(RunFolder(rankzero.folder / "mlruns/runs/s-t00")).status == "FINISHED"
    wait_until(lambda: not nodes())


def test_a_machine_that_dies_loses_its_trial_and_the_next_one_trains_elsewhere(
    cluster: Cluster, tmp_path: Path
) -> None:
    words = ray_actor.command(cluster.address, ["num_cpus=2"], 1)
    with contextlib.closing(RemoteHost(words, (), "Ray", print)) as host:
        launcher, experiment = launcher_for(host, tmp_path), tiny(host)
        trial = started(launcher, experiment, "lost")
        (node,) = nodes()
        ranks = node.children(recursive=True)
        (raylet,) = [one for one in node.parents() if one.name() == "raylet"]
        cluster.add_machine()
        os.kill(raylet.pid, signal.SIGKILL)
        assert_the_next_trains_elsewhere(launcher, experiment, trial, "lost")
    assert not psutil.wait_procs([node, *ranks], 60)[1], "a process outlived its machine"


def test_a_search_whose_trials_have_two_machines(rankzero: Command, cluster: Cluster) -> None:
    cluster.add_machine()
    code, printed = rankzero(*search(cluster.address, "--trials", 3, "--nnodes", 2))
    assert code == 0, printed
    assert "--nproc 1 --nnodes 2 --rdzv-endpoint HOST:PORT" in printed
    trial = RunFolder(rankzero.folder / "mlruns/runs/s-t00")
    begun = next(one for one in events(trial) if isinstance(one, RunStarted))
    assert begun.environment["rankzero.world_size"] == "2" and trial.system(1).exists()
    assert tracked(trial).status == "FINISHED"
    wait_until(lambda: not nodes())


def test_a_training_on_two_machines_stops_and_continues(
    rankzero: Command, cluster: Cluster
) -> None:
    cluster.add_machine()
    words = ("train", str(TINY), "--name", "run", "--ray", cluster.address, "--nnodes", 2)
    settings = ("train.steps=200", "step_seconds=0.05")
    # Cold: the command is replaced by another program.
    process = rankzero.start(*words, *settings, "--", "num_cpus=2", cold=True)
    rankzero.wait_for_step(20)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == RESUMABLE, printed
    assert printed.count("experiment") < 3, "the second machine is silent"
    (folder,) = rankzero.runs
    assert tracked(folder).status == "KILLED"
    again = (*words, "--resume-if-there", *settings[:1], "step_seconds=0.001")
    code, printed = rankzero(*again, cold=True)
    assert code == 0, printed
    assert tracked(folder).status == "FINISHED" and folder.system(1).exists()
    wait_until(lambda: not of_ray("-m rankzero train"))


def test_a_repeat_in_an_actor(rankzero: Command, cluster: Cluster) -> None:
    words = ("repeat", str(TINY), "--seeds", 2, "--ray", cluster.address, "--name", "r")
    code, printed = rankzero(*words, cold=True)
    assert code == 0, printed
    assert tracked(RunFolder(rankzero.folder / "mlruns/runs/r")).status == "FINISHED"
    code, printed = rankzero("train", str(TINY), "lx=1", "--ray", cluster.address, cold=True)
    assert code == 2 and "unknown key 'lx'" in printed


def test_hosts_of_one_machine_have_gpus_of_their_own(cluster: Cluster) -> None:
    words = ray_actor.command(cluster.address, ["num_cpus=1"], 1)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            host = RemoteHost(words, (), "Ray", print)
            tiny(stack.enter_context(contextlib.closing(host)))
        assert {one.environ()["CUDA_VISIBLE_DEVICES"] for one in nodes()} == {"0", "1"}


def test_a_search_gives_the_same_verdict_as_on_this_machine(
    rankzero: Command, cluster: Cluster, tmp_path: Path
) -> None:
    code, printed = rankzero(*TIMELESS, "--dir", tmp_path / "here" / "mlruns")
    assert code == 0, printed
    code, printed = rankzero(*TIMELESS, "--ray", cluster.address)
    assert code == 0, printed
    assert_same_results(rankzero.folder, tmp_path / "here")


def test_a_cluster_that_is_not_there_is_named(rankzero: Command) -> None:
    needs("ray")
    code, printed = rankzero(*search("127.0.0.1:1"))
    assert code == 1 and "127.0.0.1:1" in printed and "Traceback" not in printed

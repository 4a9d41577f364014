"""Trials as jobs of Slurm, by its real daemons."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from rankzero.cli.main import main
from rankzero.errors import UserError
from rankzero.events import RunStarted
from rankzero.run_store.folder import RunFolder
from rankzero.tuning.options import default_storage
from rankzero.tuning.places import ray_actor, slurm
from rankzero.tuning.places.messages import Change, Lines
from rankzero.tuning.places.remote_host import RemoteHost
from rankzero.tuning.study import find_study
from support.commands import TINY, Command, events, tracked, wait_until
from support.remote_trials import (
    TIMELESS,
    assert_same_results,
    assert_the_next_trains_elsewhere,
    launcher_for,
    started,
    tiny,
)
from support.slurm import PATH, Cluster

SEARCH = ("search", str(TINY), "--slurm", "--name", "s", "--no-probe", "--trials", "4")


def test_a_users_options_come_after_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    own = ["--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--job-name=rankzero-trials"]
    own += ["--kill-on-bad-exit=1"]
    node = [sys.executable, "-P", "-m", "rankzero.tuning.places.node", "--machines=1", "--slurm"]
    found = slurm.command(["--gpus=2"], 2, environ={})
    assert found == ["/bin/srun", *own, "--gpus=2", *node]
    found = slurm.command([], 2, machines=3, environ={})
    assert found[1:4] == ["--nodes=3", "--ntasks=3", "--cpus-per-task=2"]
    assert found[-2:] == ["--machines=3", "--slurm"]
    found = slurm.command(["--gpus=2"], 2, environ={"SLURM_JOB_ID": "7"})
    assert found == ["/bin/srun", *own, "--exact", "--gpus=2", *node]


def test_hosts_divide_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    gpus = {"SLURM_GPUS_PER_NODE": "4", "SLURM_MEM_PER_NODE": "9000"}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", **gpus}
    for parallel, memory in ((1, 9000), (2, 9000), (3, 4500), (6, 3000)):
        words = slurm.command([], 2, parallel, 1, job)
        assert words[6:9] == ["--exact", "--gpus-per-node=2", f"--mem={memory}"]
    # Two hosts of both machines have half of each.
    assert "--mem=4500" in slurm.command([], 2, 2, 2, job)


def test_a_machine_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no srun"):
        slurm.command([], 1, {})


def test_options_that_the_connection_does_not_bear_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    with pytest.raises(UserError, match="--label changes the lines"):
        slurm.command(["--label"], 1, environ={})
    with pytest.raises(UserError, match="scheduling_strategy of the actors is RankZero's own"):
        ray_actor.command("auto", ["scheduling_strategy=SPREAD"], 1, machines=2)


def test_a_file_of_the_current_folder_hides_no_module_from_an_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert ray_actor.command("auto", [], 1)[1:3] == ["-P", "-m"]
    (tmp_path / "statistics.py").write_text("raise SystemExit('mine')")
    node = ray_actor.Node()
    node.start(str(tmp_path), os.environ, 1, ["-c", "import statistics; print('theirs', end='')"])
    with node._process, node._errors:
        assert node.read() == b"theirs" and node.end()[0] == 0


@pytest.mark.parametrize(("options", "says"), [([], True), (["num_gpus=0"], False)])
def test_a_training_on_a_cluster_without_gpus_says_so(
    options: list[str], says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = MagicMock()
    ray.cluster_resources.return_value = {"CPU": 4.0}
    words = argparse.Namespace(processes=2, machines=1, training=["-m"], options=options)
    ray_actor._start(ray, words)
    assert ("add `-- num_gpus=2`" in capsys.readouterr().err) == says


def test_nested_numbers_of_threads_keep_no_actor_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8,2")
    node, words = ray_actor.Node(), "import os; print(os.environ['OMP_NUM_THREADS'], end='')"
    node.start(str(tmp_path), {}, 2, ["-c", words])
    with node._process, node._errors:
        assert node.read() == b"4" and node.end()[0] == 0


def test_other_numbers_of_tasks_than_the_trials_are_refused() -> None:
    words = [sys.executable, "-P", "-m", "rankzero.tuning.places.node", "--machines=1", "--slurm"]
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    environ = {**os.environ, **step}
    done = subprocess.run(words, check=False, env=environ, capture_output=True, text=True)
    assert done.returncode == 1 and "srun started 2 tasks on 1 machines" in done.stderr


def test_options_of_a_cluster_without_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", str(TINY), "--", "--gpus=2"]) == 2
    assert "give --slurm or --ray, too" in capsys.readouterr().err
    assert main(["search", str(TINY), "--nnodes", "2"]) == 2
    assert "--nnodes needs a cluster's machines" in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "within", [[], ["salloc", "--nodes=2", "--ntasks=2", "--cpus-per-task=2", "--mem=2000"]]
)
def test_a_search_whose_trials_are_jobs_or_steps(
    rankzero: Command, cluster: Cluster, within: list[str]
) -> None:
    words = [*within, sys.executable, "-m", "rankzero", *SEARCH, "--seeds", "2"]
    # All cores of a machine, else both hosts would be on the first.
    words += ["--challengers", "1", "--parallel", "2", "--", "--cpus-per-task", "2"]
    printed = cluster(words, rankzero.folder, rankzero.environ)
    assert "Your configuration" in printed or "Nothing beats" in printed
    study = find_study(default_storage(rankzero.folder / "mlruns"), "s")
    assert {one.state for one in study.trials()} <= {"COMPLETE", "PRUNED"}
    runs = rankzero.folder / "mlruns" / "runs"
    assert tracked(RunFolder(runs / "s-t00")).status == "FINISHED"
    if within:
        assert cluster.job(1)["NodeList"] == "first,second"
        all_jobs = ["squeue", "--noheader", "--states=all", "--format=%A"]
        assert cluster(all_jobs, rankzero.folder, {}).split() == ["1"]
    else:
        jobs = [cluster.job(number) for number in (1, 2)]
        assert {job["NodeList"] for job in jobs} == {"first", "second"}
    wait_until(lambda: not cluster(["squeue", "--noheader"], rankzero.folder, {}).strip())


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_search_whose_trials_have_two_machines(rankzero: Command, cluster: Cluster) -> None:
    words = [sys.executable, "-m", "rankzero", *SEARCH, "--seeds", "2", "--challengers", "1"]
    printed = cluster([*words, "--nnodes", "2"], rankzero.folder, rankzero.environ)
    assert "Your configuration" in printed or "Nothing beats" in printed
    assert "--nproc 1 --nnodes 2 --rdzv-endpoint HOST:PORT" in printed
    assert cluster.job(1)["NodeList"] == "first,second"
    trial = RunFolder(rankzero.folder / "mlruns" / "runs" / "s-t00")
    begun = next(one for one in events(trial) if isinstance(one, RunStarted))
    assert begun.environment["rankzero.world_size"] == "2"
    # A training of 50 ms may end before the recorder has taken a sample.
    assert [one for one in rankzero.runs if one.system(1).exists()], "nothing came home"
    assert tracked(trial).status == "FINISHED"
    wait_until(lambda: not cluster(["squeue", "--noheader"], rankzero.folder, {}).strip())


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_srun_mixes_whole_lines_of_tasks(cluster: Cluster, tmp_path: Path) -> None:
    """As long as the lines of messages.py. Longer ones are cut."""
    program = "import sys; from rankzero.tuning.places.messages import *; "
    program += "lines = Lines(0, 1, int(sys.stdin.read()) + int(os.environ['SLURM_PROCID'])); "
    program += "[lines.send(Change('x', number, bytes(99_999))) for number in range(99)]"
    words = ["sh", "-c", 'echo 7 | srun --nodes=2 --ntasks=2 "$@"', "sh", sys.executable, "-c"]
    printed = cluster([*words, program], tmp_path, {"PATH": PATH})
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "wb"):
        lines, found = Lines(reading, writing), Counter[int]()
        for line in printed.splitlines(keepends=True):
            os.write(writing, line.encode())
            found.update(one.begin for one in lines.receive() if isinstance(one, Change))
    assert found == dict.fromkeys(range(99), 2)


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_trials_share_the_gpus_and_the_memory_of_an_allocation(
    rankzero: Command, cluster: Cluster
) -> None:
    room = ("--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--gpus-per-node=2", "--mem=4000")
    words = ["salloc", *room, sys.executable, "-m", "rankzero", *SEARCH, "--seeds", "2"]
    printed = cluster([*words, "--parallel", "2"], rankzero.folder, rankzero.environ)
    assert "Your configuration" in printed or "Nothing beats" in printed
    assert "waiting for a machine" not in printed


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_machine_that_goes_down_loses_its_trial_and_the_next_one_trains_elsewhere(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
    words = cluster.words(slurm.command(["--cpus-per-task=2"], 1, environ={}), tmp_path)
    with contextlib.closing(RemoteHost(words, (), "Slurm", print)) as host:
        launcher, experiment = launcher_for(host, tmp_path), tiny(host)
        trial = started(launcher, experiment, "lost")
        machine = cluster.job(1)["NodeList"]
        down = f"NodeName={machine}", "State=down", "Reason=test"
        cluster(["scontrol", "update", *down], tmp_path, {})
        assert_the_next_trains_elsewhere(launcher, experiment, trial, "lost")
    assert {machine, cluster.job(2)["NodeList"]} == {"first", "second"}


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_search_gives_the_same_verdict_as_on_this_machine(
    rankzero: Command, cluster: Cluster, tmp_path: Path
) -> None:
    code, printed = rankzero(*TIMELESS, "--dir", tmp_path / "here" / "mlruns")
    assert code == 0, printed
    words = [sys.executable, "-m", "rankzero", *TIMELESS, "--slurm"]
    cluster(words, rankzero.folder, rankzero.environ)
    assert_same_results(rankzero.folder, tmp_path / "here")

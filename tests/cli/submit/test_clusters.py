"""`rankzero train --slurm` and `repeat --slurm`: srun runs the same command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rankzero.catalog.lookup import folders
from rankzero.cli.main import main
from rankzero.events import RunStarted
from rankzero.repeats import plan
from rankzero.run_store.folder import RunFolder
from support.commands import TINY, Command, events, tracked
from support.slurm import Cluster

TRAIN, REPEAT = ("train", str(TINY), "--slurm"), ("repeat", str(TINY), "--slurm")
OWN = ["--ntasks-per-node=1", "--kill-on-bad-exit=0"]


@pytest.fixture
def srun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file in which an srun on the path writes its words and torchrun's variables."""
    written, program = tmp_path / "written", tmp_path / "bin" / "srun"
    program.parent.mkdir()
    names = 'env | sed -n "s/^\\(PET_[A-Z_]*\\)=.*/\\1/p"'
    program.write_text(f'#!/bin/sh\n(printf "%s\\n" "$@"; {names}) > {written}\nexit 75\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return written


def test_srun_runs_the_same_command_with_one_name(rankzero: Command, srun: Path) -> None:
    rankzero.environ |= {"PATH": os.environ["PATH"], "PET_NNODES": "2"}
    code, printed = rankzero(*TRAIN, "--nproc", 2, "lr=0.1", "--", "--comment", "a b", cold=True)
    assert (code, printed) == (75, "")
    words = srun.read_text().splitlines()
    name = words[0].removeprefix("--job-name=")
    again = ["-P", "-m", "rankzero", "train", str(TINY), "--nproc", "2", "lr=0.1", "--name", name]
    options = ["--cpus-per-task=2", *OWN, "--comment", "a b"]
    assert words == [f"--job-name={name}", *options, sys.executable, *again]


def test_an_allocation_gives_each_of_its_machines_one_task(rankzero: Command, srun: Path) -> None:
    rankzero.environ |= {"PATH": os.environ["PATH"], "SLURM_JOB_NUM_NODES": "3"}
    assert rankzero(*TRAIN, "--name", "mine", cold=True)[0] == 75
    words = srun.read_text().splitlines()
    assert words[:4] == ["--job-name=mine", *OWN, "--ntasks=3"] and words.count("mine") == 1


def test_a_training_may_use_a_part_of_an_allocation(rankzero: Command, srun: Path) -> None:
    rankzero.environ |= {"PATH": os.environ["PATH"], "SLURM_JOB_NUM_NODES": "4"}
    for own in (["--nodes", "2"], ["-N2"]):
        assert rankzero(*TRAIN, "--name", "mine", "--", *own, cold=True)[0] == 75
        assert "--ntasks=2" in srun.read_text().splitlines()


def test_a_repeat_is_one_task(rankzero: Command, srun: Path) -> None:
    rankzero.environ |= {"PATH": os.environ["PATH"]}
    assert rankzero(*REPEAT, "--seeds", 2, cold=True)[0] == 75
    words = srun.read_text().splitlines()
    assert words[1:3] == ["--nodes=1", "--ntasks=1"]
    assert words[-3:-1] == ["2", "--name"] and words[-1].startswith("repeat-")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((*TRAIN, "lx=1"), "unknown key 'lx'"),
        ((*REPEAT, "lx=1"), "unknown key 'lx'"),
        ((*TRAIN, "--nnodes", "2"), "-- --nodes 2"),
        ((*TRAIN, "--resume-if-there"), "add --name NAME"),
        (("train", str(TINY), "--ray", "auto", "--resume-if-there"), "add --name NAME"),
        (("train", str(TINY), "--ray", "auto", "--nnodes", "1:2"), "--nnodes 2"),
        (("train", str(TINY), "--", "--nodes", "2"), "give --slurm or --ray, too"),
    ],
)
@pytest.mark.usefixtures("srun")
def test_mistakes_are_found_before_the_job_waits(
    words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == 2
    assert error in capsys.readouterr().err


def test_a_machine_without_slurm_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(list(TRAIN)) == 2
    assert "no srun" in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_training_on_two_machines_is_one_run(rankzero: Command, cluster: Cluster) -> None:
    words = [sys.executable, "-m", "rankzero", *TRAIN, "--name", "two", "--", "--nodes=2"]
    printed = cluster(words, rankzero.folder, rankzero.environ)
    run = RunFolder(rankzero.folder / "mlruns" / "runs" / "two")
    assert tracked(run).status == "FINISHED" and "two" in printed
    started = [event for event in events(run) if isinstance(event, RunStarted)]
    assert [event.environment["rankzero.world_size"] for event in started] == ["2"]


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_repeat_runs_and_is_extended_on_slurms_machine(
    rankzero: Command, cluster: Cluster
) -> None:
    start = [sys.executable, "-m", "rankzero", *REPEAT, "train.steps=20", "--seeds", "1"]
    cluster([*start, "--name", "r"], rankzero.folder, rankzero.environ)
    more = [sys.executable, "-m", "rankzero", "repeat", "r", "--seeds", "2", "--slurm"]
    assert "2 of 2" in cluster(more, rankzero.folder, rankzero.environ)
    runs = rankzero.folder / "mlruns" / "runs"
    stored = plan.stored(RunFolder(runs / "r"))
    assert stored is not None and [*stored.seeds] == [0, 1]
    assert {tracked(run).status for run in folders(runs) if run.path.name != "r"} == {"FINISHED"}

"""`rankzero submit`: a job's script, and a run that Slurm's real daemons queue again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rankzero.cli.main import main
from support.commands import TINY, Command, losses, starts, tracked, wait_until
from support.slurm import Cluster

SETTINGS = ("train.steps=90", "train.eval_every=20", "dropout=0.1", "augment=true")
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
SLURM = ("submit", "--slurm", str(TINY))


def submitted(rankzero: Command, cluster: Cluster, *words: str) -> int:
    """Submit a training; return the job's number."""
    command = [sys.executable, "-m", "rankzero", *SLURM, "--name", "job", *words]
    output = cluster(command, rankzero.folder, rankzero.environ)
    return int(output.split("job is job ")[1].split(":")[0])


def wait_for_end(rankzero: Command, cluster: Cluster, job: int) -> None:
    try:
        wait_until(lambda: cluster.job(job)["JobState"] in ENDED, 400)
    finally:
        output = (rankzero.folder / f"slurm-{job}.out").read_text()
        print(output)
    assert cluster.job(job)["JobState"] == "COMPLETED"
    assert "Traceback" not in output and "resource_tracker" not in output


def script_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*SLURM, "--dry-run", *words]) == 0
    return capsys.readouterr().out


def test_a_dry_run_prints_a_script_that_a_shell_can_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TINY.parent)
    monkeypatch.setenv("RANKZERO_DIR", "here")
    words = ("lr=0.5", "--nproc", "2", "--name", "first", "--", "--nodes", "2", "--comment", "a b")
    assert main(["submit", "--slurm", "--dry-run", TINY.name, *words]) == 0
    script, root = capsys.readouterr().out, str(TINY.parent / "here")
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    assert "#SBATCH --nodes 2 --comment 'a b'\n" in script
    assert "#SBATCH --job-name=first\n" in script and f"ls {root}/runs/first/checkpoints" in script
    train = next(line for line in script.splitlines() if "rankzero train" in line)
    wanted = f"-P -m rankzero train {TINY} lr=0.5 --nproc 2 --name first --resume-if-there"
    assert shlex.split(train) == [sys.executable, *wanted.split(), "--dir", root]


def test_a_job_has_none_of_the_shells_variables_of_torchrun(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\nenv > {tmp_path}/environ\n")
    srun.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PET_NNODES": "1", "KEPT": "PET_NNODES"}
    monkeypatch.setenv("PET_NNODES", "2")
    script = script_of(capsys, "--name", "first")
    subprocess.run(["sh", "-u"], input=script, text=True, check=True, env=environ)
    assert [line for line in (tmp_path / "environ").read_text().split() if "PET" in line] == [
        "KEPT=PET_NNODES"
    ]


def test_a_job_gets_a_name_that_stays(capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of(capsys, "--resume-if-there")
    name = script.split("#SBATCH --job-name=")[1].split()[0]
    assert f"--resume-if-there --name {name} --dir " in script and "#SBATCH \n" not in script


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("submit", str(TINY)), "say where the job shall run"),
        ((*SLURM, "lx=1"), "unknown key 'lx'"),
        ((*SLURM, "--nproc", "3", "train.batch_size=64"), "evenly among 3 processes"),
        ((*SLURM, "--nnodes", "2"), "-- --nodes 2"),
        ((*SLURM, "--nodes", "2"), "no option --nodes"),
        ((*SLURM, "--", "--array=0-3"), "all tasks of an --array would be the one run"),
        ((*SLURM, "--", "-N", "1", "-a", "0-3"), "rankzero repeat --slurm trains several seeds"),
    ],
)
def test_mistakes_are_found_before_the_job_waits(
    words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--dry-run"] if words[1] == "--slurm" else list(words)) == 2
    assert error in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_job_that_slurm_queues_again_is_one_run_as_if_never_stopped(
    rankzero: Command, cluster: Cluster
) -> None:
    rankzero.succeed("train", TINY, "--name", "whole", *SETTINGS)
    limits = ("--", "--time", "2", "--signal", "TERM@45")
    job = submitted(rankzero, cluster, *SETTINGS, "step_seconds=1.0", *limits)
    folder = rankzero.wait_for_step(1, "job")
    wait_until(lambda: cluster.job(job)["Restarts"] == "1", 300)  # by the time limit
    stopped = max(losses(folder))
    rankzero.wait_for_step(stopped + 5, "job")
    cluster(["scontrol", "requeue", job], rankzero.folder, {})
    wait_for_end(rankzero, cluster, job)
    # The limit may stop it a third time on a machine that is busy.
    assert int(cluster.job(job)["Restarts"]) == len(starts(folder)) - 1 >= 2
    assert starts(folder)[:2] == [0, stopped] and starts(folder) == sorted(set(starts(folder)))
    whole, *others = rankzero.runs
    assert others == [folder] and losses(folder) == losses(whole)
    assert tracked(folder).status == "FINISHED"


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_job_of_two_machines_that_is_stopped_twice_is_one_run(
    rankzero: Command, cluster: Cluster
) -> None:
    """By the signals that Slurm's ``--signal`` sends to the processes of a step."""
    rankzero.succeed("train", TINY, "--name", "whole", "--nproc", 2, *SETTINGS)
    words = (*SETTINGS, "--nproc", "1", "step_seconds=0.3", "--", "--time", "20", "--nodes", "2")
    job = submitted(rankzero, cluster, *words)
    folder = rankzero.wait_for_step(5, "job")
    for count, number in enumerate(("TERM", "USR1"), start=1):
        cluster(["scancel", f"--signal={number}", job], rankzero.folder, {})
        wait_until(lambda count=count: cluster.job(job)["Restarts"] == str(count), 300)
        rankzero.wait_for_step(max(losses(folder)) + 5, "job")
    wait_for_end(rankzero, cluster, job)
    assert len(starts(folder)) == 3 and starts(folder) == sorted(set(starts(folder)))
    whole, *others = rankzero.runs
    assert others == [folder] and losses(folder) == losses(whole)
    assert tracked(folder).status == "FINISHED"

"""Trials as jobs of Slurm, by its real daemons."""

from __future__ import annotations

import sys

import pytest

from rankzero.cli.main import main
from rankzero.errors import UserError
from rankzero.run_store.folder import RunFolder
from rankzero.tuning.options import default_storage
from rankzero.tuning.places import slurm
from rankzero.tuning.study import find_study
from support.commands import TINY, Command, tracked, wait_until
from support.slurm import Cluster

SEARCH = ("search", str(TINY), "--slurm", "--name", "s", "--no-probe", "--trials", "4")


def test_a_users_options_come_after_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    own = ["--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--job-name=rankzero-trials"]
    node = [sys.executable, "-m", "rankzero.tuning.places.node"]
    assert slurm.command(["--gpus=2"], 2, {}) == ["/bin/srun", *own, "--gpus=2", *node]
    found = slurm.command(["--gpus=2"], 2, {"SLURM_JOB_ID": "7"})
    assert found == ["/bin/srun", *own, "--exact", "--gpus=2", *node]


def test_a_machine_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no srun"):
        slurm.command([], 1, {})


def test_options_of_srun_without_slurm_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", str(TINY), "--", "--gpus=2"]) == 2
    assert "give --slurm, too" in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_search_whose_trials_are_jobs(rankzero: Command, cluster: Cluster) -> None:
    words = [sys.executable, "-m", "rankzero", *SEARCH, "--seeds", "2", "--challengers", "1"]
    # All cores of a machine, else both hosts would be on the first.
    words += ["--parallel", "2", "--", "--cpus-per-task", "2"]
    printed = cluster(words, rankzero.folder, rankzero.environ)
    assert "Your configuration" in printed or "Nothing beats" in printed
    study = find_study(default_storage(rankzero.folder / "mlruns"), "s")
    assert {one.state for one in study.trials()} <= {"COMPLETE", "PRUNED"}
    runs = rankzero.folder / "mlruns" / "runs"
    assert tracked(RunFolder(runs / "s-t00")).status == "FINISHED"
    jobs = [cluster.job(number) for number in (1, 2)]
    assert {job["NodeList"] for job in jobs} == {"first", "second"}
    wait_until(lambda: not cluster(["squeue", "--noheader"], rankzero.folder, {}).strip())

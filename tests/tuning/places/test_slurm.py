"""Trials as jobs of Slurm: by its real daemons, with a machine that goes down."""

from __future__ import annotations

import sys
import threading

import pytest

from rankzero.errors import UserError
from rankzero.run_store.folder import RunFolder
from rankzero.tuning.options import default_storage
from rankzero.tuning.places import slurm
from rankzero.tuning.study import find_study
from support.commands import TINY, Command, last_end, losses, tracked, wait_until
from support.slurm import Cluster

SEARCH = ("search", str(TINY), "--slurm", "--name", "s", "--no-probe", "--trials", "5")


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


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_search_over_two_machines_outlives_one(rankzero: Command, cluster: Cluster) -> None:
    settings = ("train.epochs=6", "step_seconds=0.02", "--seeds", "2", "--challengers", "1")
    words = [sys.executable, "-m", "rankzero", *SEARCH, *settings, "--parallel", "2"]
    printed: list[str] = []
    search = threading.Thread(
        target=lambda: printed.append(cluster(words, rankzero.folder, rankzero.environ))
    )
    search.start()

    def machines() -> list[str]:
        return cluster(["squeue", "--noheader", "--format=%N"], rankzero.folder, {}).split()

    wait_until(lambda: len(set(machines())) == 2, 200)
    runs = rankzero.folder / "mlruns" / "runs"
    # Of the two trials that run side by side, one is on the second machine.
    wait_until(lambda: all(losses(RunFolder(runs / f"s-t0{one}")) for one in (1, 2)), 200)
    down = ["scontrol", "update", "nodename=second", "state=down", "reason=test"]
    cluster(down, rankzero.folder, {})
    search.join(400)
    assert "was lost with its host process: it is tried again" in printed[0]
    assert "Your configuration" in printed[0] or "Nothing beats" in printed[0]
    study = find_study(default_storage(rankzero.folder / "mlruns"), "s")
    lost = [one for one in study.trials() if "lost" in one.facts]
    assert len(lost) == 1 and last_end(RunFolder(runs / lost[0].facts["run"])).status == "FAILED"
    assert tracked(RunFolder(runs / "s")).status == "FINISHED" and not machines()

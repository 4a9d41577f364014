"""`rankzero.track` in real processes, as each launcher starts them: one run, and rank 0's alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import rankzero
from rankzero.catalog.lookup import folders
from rankzero.events import RunEnded, StepsLogged
from rankzero.ranks import Ranks
from rankzero.run_store.folder import RunFolder
from support.commands import wait_until
from support.runs import of_kind

VALUES = {1: 1.0, 2: 2.0, 3: 3.0}
"""Rank 0's values; rank n logs 100 n more."""

QUIET = """
import types
import rankzero.tracking.recorder
handle = types.SimpleNamespace(close=lambda: None)
rankzero.tracking.recorder.start = lambda *words, **options: handle
"""

TRAINING = """
import os, sys
import rankzero

def train(rank, fail=lambda: None):
    with rankzero.track("launched") as run:
        for step in (1, 2, 3):
            run.log({"train/loss": 100 * rank + step}, step=step)
        if rank == 0:
            fail()
"""

BY_VARIABLE = "train(int(os.environ[sys.argv[1]]))"

SPAWNED = """
import torch.distributed as dist
import torch.multiprocessing as mp

def joined(rank, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    train(rank)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(joined, (sys.argv[1],), nprocs=2)
"""

ALONE = """
import torch.distributed as dist

rendezvous = f"file://{os.getcwd()}/rendezvous"
dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
train(int(os.environ["RANK"]))
dist.destroy_process_group()
"""

RAISING = """
def boom():
    raise ValueError("broken on purpose")

train(int(os.environ["RANK"]), boom)
"""

UNKNOWN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "RANKZERO_DIR",
    "MLFLOW_TRACKING_URI",
    "TF_CONFIG",
    "SLURM_STEP_ID",
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return where a training is to be written, in a folder of its own."""
    return tmp_path / "training.py"


def start(script: Path, *command: str, **environ: str) -> subprocess.Popen[str]:
    known = {name: value for name, value in os.environ.items() if name not in UNKNOWN}
    return subprocess.Popen(
        command,
        cwd=script.parent,
        env={**known, "OMP_NUM_THREADS": "1", **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(*processes: subprocess.Popen[str]) -> list[str]:
    """Return what each process printed, once all have ended well."""
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), printed
    return printed


def the_only_run(script: Path) -> RunFolder:
    (only,) = folders(script.parent / "mlruns" / "runs")
    return only


def assert_one_whole_run(script: Path) -> None:
    folder = the_only_run(script).path
    pairs = [
        pair
        for one in of_kind(folder, StepsLogged)
        for pair in zip(one.steps, one.metrics["train/loss"], strict=True)
    ]
    assert dict(pairs) == VALUES
    assert len(pairs) == len(VALUES), "each step once"
    assert [end.status for end in of_kind(folder, RunEnded)] == ["FINISHED"]


def two_tasks(script: Path, variable: str, of_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Run rank 1 and rank 0 as their launcher would, each with its own variables."""
    script.write_text(QUIET + TRAINING + BY_VARIABLE)
    ended(
        *(start(script, sys.executable, str(script), variable, **of_rank[rank]) for rank in (1, 0))
    )
    assert_one_whole_run(script)


def torchrun(script: Path) -> subprocess.Popen[str]:
    return start(
        script,
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        "RANK",
    )


def test_torchrun(script: Path) -> None:
    script.write_text(QUIET + TRAINING + BY_VARIABLE)
    ended(torchrun(script))
    assert_one_whole_run(script)


def test_spawned_processes_use_their_process_group(script: Path) -> None:
    script.write_text(QUIET + TRAINING + SPAWNED)
    ended(start(script, sys.executable, str(script), str(script.parent / "rendezvous")))
    assert_one_whole_run(script)


def test_rank_of_the_task_that_spawned_this_process_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "rankzero.training.distributed.world.process_group_ranks", lambda: Ranks(3, 8)
    )
    with rankzero.track("launched") as run:
        run.log({"train/loss": 1.0}, step=1)
    assert run.folder is None and not (tmp_path / "mlruns").exists()


def test_srun(script: Path) -> None:
    shared = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    two_tasks(
        script,
        "SLURM_PROCID",
        {n: {**shared, "SLURM_PROCID": f"{n}", "SLURM_LOCALID": f"{n}"} for n in (0, 1)},
    )


def test_horovodrun(script: Path) -> None:
    shared = {
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }
    tasks = {n: {**shared, "HOROVOD_RANK": f"{n}", "HOROVOD_LOCAL_RANK": f"{n}"} for n in (0, 1)}
    two_tasks(script, "HOROVOD_RANK", tasks)


def test_tensorflow_workers(script: Path) -> None:
    cluster = {"worker": ["localhost:4001", "localhost:4002"]}
    configs = {n: {"cluster": cluster, "task": {"type": "worker", "index": n}} for n in (0, 1)}
    two_tasks(
        script, "INDEX", {n: {"TF_CONFIG": json.dumps(configs[n]), "INDEX": f"{n}"} for n in (0, 1)}
    )


def test_exception_on_rank_0_fails_the_run(script: Path) -> None:
    script.write_text(QUIET + TRAINING + RAISING)
    process = torchrun(script)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "broken on purpose" in printed
    (end,) = of_kind(the_only_run(script).path, RunEnded)
    assert end.status == "FAILED"
    assert end.reason.startswith("ValueError: broken on purpose (") and "in boom)" in end.reason
    assert end.error is not None and "in boom" in end.error


def test_rank_0_that_dies_silently_fails_the_run(script: Path) -> None:
    script.write_text(TRAINING + "train(int(os.environ['RANK']), lambda: os._exit(9))")
    process = start(script, sys.executable, str(script), RANK="0", WORLD_SIZE="2")
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 9, printed
    folder = the_only_run(script).path
    wait_until(lambda: of_kind(folder, RunEnded))  # The recorder writes it.
    (end,) = of_kind(folder, RunEnded)
    assert end.status == "FAILED" and "died without writing its end" in end.reason


def test_process_group_of_one_does_not_override_the_launcher(script: Path) -> None:
    script.write_text(QUIET + TRAINING + ALONE)
    ended(start(script, sys.executable, str(script), RANK="1", WORLD_SIZE="2"))
    assert not (script.parent / "mlruns").exists()

"""DeepSpeed and Lightning with a part of the optimizer on each process, and their checkpoints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from frameworks.examples import (
    EXAMPLES,
    SECONDS,
    best,
    end,
    free_ports,
    needs,
    run,
    start,
    steps_of,
    tracked,
)
from rankzero.events import RunStarted
from support.runs import of_kind

pytestmark = pytest.mark.timeout(3 * SECONDS)


def deepspeed(folder: Path, *words: str) -> None:
    needs("deepspeed")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip(
            "without GPUs, DeepSpeed compiles its collectives: it needs a C++ compiler (Debian's "
            "g++)"
        )
    (port,) = free_ports(1)
    launcher = "deepspeed", "--num_accelerators", "2", "--master_port", str(port)
    example, cpu = str(EXAMPLES / "deepspeed_digits.py"), {"DS_ACCELERATOR": "cpu"}
    code, output = end(start(folder, *launcher, example, *words, CUDA_VISIBLE_DEVICES="", **cpu))
    assert code == 0, output


def lightning(folder: Path, *words: str) -> None:
    needs("lightning")
    code, output = run(str(EXAMPLES / "lightning_sharded_digits.py"), folder, *words)
    assert code == 0, output


def take_mlflows(folder: Path, checkpoint: Path) -> None:
    """Replace a checkpoint by what MLflow has of it."""
    tracked(folder)
    (kept,) = (folder / "mlruns" / "artifacts").rglob(checkpoint.name)
    assert {path.name for path in kept.iterdir()} == {path.name for path in checkpoint.iterdir()}
    shutil.rmtree(checkpoint)
    shutil.copytree(kept, checkpoint)


def assert_one_run(folder: Path, attempts: int) -> None:
    found = tracked(folder)
    assert found.status == "FINISHED" and best(found) > 0.8
    assert steps_of(folder, found, "train/loss") == list(range(1, 45))
    assert steps_of(folder, found, "val/accuracy") == [22, 44]
    assert len(of_kind(next((folder / "mlruns/runs").iterdir()), RunStarted)) == attempts


def test_deepspeed_zero1_on_two_processes_is_one_run(tmp_path: Path) -> None:
    deepspeed(tmp_path, "2")
    assert_one_run(tmp_path, attempts=1)
    assert tracked(tmp_path).params["zero_optimization.stage"] == "1"


@pytest.mark.parametrize("stage", ["2", "3"])
def test_deepspeed_continues_from_the_checkpoint_that_mlflow_has(
    stage: str, tmp_path: Path
) -> None:
    deepspeed(tmp_path, "1", "--stage", stage, "--name", "r1")
    take_mlflows(tmp_path, tmp_path / "deepspeed" / "r1" / "epoch-0")
    deepspeed(tmp_path, "2", "--stage", stage, "--name", "r1")
    assert_one_run(tmp_path, attempts=2)
    assert tracked(tmp_path).params["zero_optimization.stage"] == stage


def test_lightning_continues_from_the_sharded_checkpoint_that_mlflow_has(tmp_path: Path) -> None:
    lightning(tmp_path, "1", "r1")
    checkpoint = tmp_path / "lightning" / "r1" / "epoch=0-step=22.ckpt"
    assert {path.name for path in checkpoint.iterdir()} == {
        *(".metadata", "meta.pt"),
        *("__0_0.distcp", "__1_0.distcp"),
    }
    take_mlflows(tmp_path, checkpoint)
    lightning(tmp_path, "2", "r1")
    assert_one_run(tmp_path, attempts=2)

"""`SummaryWriter` over a tracked run: a script for TensorBoard changes its import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import rankzero
from rankzero.events import RunEnded
from rankzero.integrations.tensorboard import SummaryWriter
from rankzero.run_store.folder import RunFolder
from support.memory_store import MemoryStore, delivered
from support.runs import of_kind


def folder_of(writer: SummaryWriter) -> RunFolder:
    assert writer.run.folder is not None
    return RunFolder(writer.run.folder)


def ends(writer: SummaryWriter) -> list[str]:
    return [event.status for event in of_kind(writer.run.folder, RunEnded)]


@pytest.mark.parametrize("launcher", ["ipykernel_launcher", "colab_kernel_launcher"])
def test_notebooks_experiment_is_not_the_kernels(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [f"/usr/lib/{launcher}.py", "-f", "kernel.json"])
    with SummaryWriter(offline=True) as writer:
        assert folder_of(writer).identity.experiment == "tensorboard"


def test_calls_of_scripts_reach_mlflow() -> None:
    with SummaryWriter("runs/lr0.01", "-b8", 10, flush_secs=5, offline=True) as writer:
        for step in range(3):
            writer.add_scalar("loss", torch.tensor(1.0 / (step + 1)), step, 1e9)
        writer.add_scalar("loss", 0.25, global_step=3, walltime=1e9, new_style=True)
        writer.add_scalars("accuracy", {"train": 0.5, "val": 0.25}, 3)
        writer.add_image("digit", torch.rand(1, 8, 8), 3)
        writer.add_image("flat", np.zeros((8, 6, 3), np.uint8), 3, dataformats="hwc")
        writer.add_images("batch", torch.rand(20, 3, 8, 8, dtype=torch.bfloat16), 3)
        writer.add_figure("curve", [Figure(), Figure()], 3)
        writer.add_text("note", "a text", 3.0)
        writer.add_text("/all", "of it")
        writer.add_hparams({"lr": 0.1}, {"hparam/loss": 0.25})
        writer.add_hparams({"lr": 0.2}, {"hparam/loss": 0.5})
        writer.flush()
        assert Path(writer.get_logdir()).samefile("runs/lr0.01")
    folder, store = folder_of(writer), MemoryStore()
    delivered(folder, store)
    assert folder.identity.experiment == "lr0.01" and store.status == "FINISHED"
    assert store.tags["comment"] == "-b8"
    assert store.curve("loss") == {0: 1.0, 1: 0.5, 2: pytest.approx(1 / 3), 3: 0.25}
    assert store.curve("accuracy/val") == {3: 0.25} and store.params["lr"] == "0.1"
    keys = {key for key, step, _ in store.pictures if step == 3}
    assert keys == {"digit", "flat", "curve/0", "curve/1", *(f"batch/{n}" for n in range(16))}
    assert store.artifacts["text/note/step_3.md"] == "a text"
    assert store.artifacts["text/all.md"] == "of it"
    (below,) = folder.children
    other = MemoryStore()
    delivered(below, other)
    assert other.params["lr"] == "0.2" and other.curve("hparam/loss") == {0: 0.5}


def test_every_method_takes_the_time_that_torchs_writer_takes() -> None:
    time: dict[str, Any] = {"global_step": 1, "walltime": 1e9}
    image = torch.rand(3, 8, 8)
    with SummaryWriter("runs/digits", offline=True) as writer:
        writer.add_scalar("loss", 0.5, **time)
        writer.add_scalars("accuracy", {"val": 0.25}, **time)
        writer.add_image("digit", image, **time)
        writer.add_images("batch", image[None], **time)
        writer.add_figure("curve", Figure(), **time)
        writer.add_text("note", "a text", **time)
        writer.add_histogram("weights", image, **time)
        writer.add_figure("positional", Figure(), 1, True, 1e9)
        writer.add_text("positional", "a text", 1, 1e9)
    folder, store = folder_of(writer), MemoryStore()
    delivered(folder, store)
    assert store.curve("accuracy/val") == {1: 0.25}
    keys = {key for key, _, _ in store.pictures}
    assert keys == {"digit", "batch/0", "curve", "positional"}
    assert store.artifacts["text/note/step_1.md"] == "a text"


def test_what_cannot_be_kept_is_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    writer = SummaryWriter(offline=True, experiment="mine")
    for step in (1, 2):
        writer.add_histogram("weights", torch.rand(9), step)
        writer.add_graph(torch.nn.Linear(1, 1))
        writer.add_image("odd", torch.rand(2, 2), step)
        writer.add_scalar("loss", 0.5, step)
    writer.add_image("other", "a path", 1)
    assert not hasattr(writer, "no_such_name")
    assert Path(writer.log_dir) == folder_of(writer).artifacts
    writer.close()
    printed = capsys.readouterr().out
    assert printed.count("add_histogram: what it writes is not kept") == 1
    assert printed.count("add_graph") == 1 and printed.count("odd is not logged") == 1
    assert printed.count("other is not logged") == 1
    assert ends(writer) == ["FINISHED"]


def test_run_that_is_given_stays_open() -> None:
    run = rankzero.track("mine", offline=True)
    with pytest.raises(ValueError, match="mine"), SummaryWriter(run=run) as writer:
        writer.add_scalar("loss", 1.0)
        raise ValueError("mine")
    assert ends(writer) == []
    run.finish()
    with pytest.raises(ValueError, match="mine"), SummaryWriter(offline=True) as writer:
        raise ValueError("mine")
    assert ends(writer) == ["FAILED"]


def test_other_ranks_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with SummaryWriter("runs/digits") as writer:
        writer.add_scalar("loss", 1.0, 1)
        writer.add_histogram("weights", torch.rand(9), 1)
        writer.add_hparams({}, {}, run_name="other")
    assert not Path("runs").exists() and not Path("mlruns").exists()

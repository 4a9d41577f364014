"""Models that a program logs: traced at once, delivered later, and loaded by MLflow itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow.pytorch
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

import rankzero
from rankzero.events import ModelLogged
from rankzero.integrations.own_loop.tracked_run import TrackedRun
from rankzero.mlflow_store.client import MlflowRuns, RunRecord
from rankzero.run_store import delivery_state
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync
from support.runs import of_kind
from support.syncs import recorded


@pytest.fixture
def run() -> TrackedRun:
    return rankzero.track("mine", name="r1", offline=True)


def folder_of(run: TrackedRun) -> RunFolder:
    assert run.folder is not None
    return RunFolder(run.folder)


def in_mlflow(run: TrackedRun) -> tuple[MlflowRuns, RunRecord]:
    """Deliver the run, and return it as MLflow has it."""
    folder = folder_of(run)
    assert sync.deliver(folder).complete
    store = MlflowRuns(folder.identity.tracking_uri)
    return store, store.find_run("r1")


class Branching(nn.Module):
    """Cannot be traced: what it does depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x


def test_model_is_delivered_as_it_was_and_loads_in_mlflow(run: TrackedRun) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.BatchNorm1d(4))
    run.log({"train/loss": 1.0}, step=7)
    run.log_model(torch.compile(nn.DataParallel(model)), "net", input_example=np.ones((1, 3), "f4"))
    assert model.training, "the training goes on"
    x = torch.randn(5, 3)
    wanted = model.eval()(x)
    nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    run.finish()
    store, record = in_mlflow(run)
    (found,) = store.models.of_run(record)
    assert (found.name, found.tags["rankzero.step"], found.status) == ("net", "7", "READY")
    loaded = mlflow.pytorch.load_model(found.artifact_location)
    torch.testing.assert_close(loaded(x), wanted)


def test_a_logged_model_is_synced(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    order, folder = recorded(monkeypatch), folder_of(run)
    run.log_model(nn.Linear(3, 1), input_example=torch.ones(2, 3), step=1)
    (model,) = folder.models.iterdir()
    assert {path for path in model.rglob("*") if path.is_file()} <= set(order)
    assert folder.models in order, "its name, too"


def test_second_delivery_adds_no_second_model(run: TrackedRun) -> None:
    for _ in range(2):
        run.log_model(nn.Linear(3, 1), input_example=torch.ones(2, 3), step=1)
    run.finish()
    store, record = in_mlflow(run)
    before = {model.model_id for model in store.models.of_run(record)}
    assert len(before) == 2
    # As after a power loss: the courier does not know what it has sent.
    delivery_state.path_of(folder_of(run), 0).unlink()
    store, record = in_mlflow(run)
    assert {model.model_id for model in store.models.of_run(record)} == before


def test_interrupted_upload_is_replaced_and_a_model_of_another_stays(run: TrackedRun) -> None:
    run.log_model(nn.Linear(3, 1), input_example=torch.ones(2, 3))
    run.finish()
    (event,) = of_kind(run.folder, ModelLogged)
    store = MlflowRuns(folder_of(run).identity.tracking_uri)
    record = store.open_run(folder_of(run).identity, event.time)
    left, other = (
        store._client.create_logged_model(
            record.experiment_id,
            name="model",
            source_run_id=record.run_id,
            tags=tags,
            model_type="pytorch",
        ).model_id
        for tags in ({"rankzero.saved_at": repr(event.time)}, {})
    )
    store, record = in_mlflow(run)
    states = {model.model_id: str(model.status) for model in store.models.of_run(record)}
    assert states.pop(other) == "PENDING" and left not in states
    assert list(states.values()) == ["READY"]


def test_model_that_cannot_be_logged_costs_only_itself(
    run: TrackedRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, example = nn.Linear(3, 1), torch.ones(2, 3)
    odd: list[tuple[Any, str, Any, str]] = [
        (Branching(), "a", example, "cannot be traced"),
        (3, "a", example, "int is no module of PyTorch"),
        (model, "a/b", example, "the name of a model"),
        (model, "", example, "the name of a model"),
        (model, "\udcff", example, "UnicodeEncodeError"),
        (model, "a", None, "is not logged"),
        (model, "a", torch.ones(2, 5), "shapes cannot be multiplied"),
    ]
    for one, name, inputs, reason in odd:
        run.log_model(one, name, input_example=inputs)
        assert reason in capsys.readouterr().out, name
    run.log_model(model, input_example=example)
    run.log({"loss": 1.0}, 1)
    run.finish()
    (kept,) = folder_of(run).models.iterdir()
    assert not [path for path in kept.rglob("*") if "pickle" in path.name or path.suffix == ".pth"]
    kept.rename(tmp_path / "aside")
    (kept.parent / kept.name).symlink_to(tmp_path / "aside")
    store, record = in_mlflow(run)
    assert not store.models.of_run(record) and record.metrics["loss"] == 1.0
    assert "model model: " in record.tags["rankzero.rejected"]


def test_model_that_is_divided_among_ranks_is_not_traced(
    run: TrackedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other ranks would have to take part, and do not."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        divided = distribute_module(nn.Linear(3, 1), init_device_mesh("cpu", (1,)))
        run.log_model(divided, input_example=torch.ones(2, 3))
    finally:
        torch.distributed.destroy_process_group()
    assert "divided among the ranks" in capsys.readouterr().out


def test_users_own_calls_of_mlflow_keep_their_settings(tmp_path: Path) -> None:
    """In a fresh process, because mlflow's client is imported once."""
    subprocess.run([sys.executable, "-c", FRESH], cwd=tmp_path, check=True)


FRESH = """
import os
for name in [name for name in os.environ if name.startswith("MLFLOW")]:
    del os.environ[name]
import torch, rankzero
with rankzero.track("mine", offline=True) as run:
    run.log_model(torch.nn.Linear(3, 1), input_example=torch.ones(2, 3))
assert len(list((run.folder / "models").iterdir())) == 1
assert not [name for name in os.environ if name.startswith("MLFLOW")]
"""

"""The trained model as others load it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankzero import Train
from rankzero.lightning_module.steps_and_log import LightningSteps, TrainerStub
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.training.checkpoints import mlflow_model
from support.runs import T0, make_folder


class Branching(nn.Module):
    """Cannot be traced: what it does depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum().item() > 0 else -self.layer(x)


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@pytest.fixture
def log(sqlite: str, tmp_path: Path) -> Callable[..., Any]:
    """Log a model and load it again, as anybody would."""
    import mlflow.pytorch

    tracker, folder = MlflowRuns(sqlite), make_folder(tmp_path, sqlite)
    run = tracker.open_run(folder.identity, T0)

    def log_and_load(model: nn.Module, example: Any) -> Any:
        with mlflow_model.saved(model, example) as (saved, kind):
            tags = {"rankzero.format": kind}
            model_id = tracker.models.log_model(run, saved, "model", 7, tags)
        found = tracker._client.get_logged_model(model_id)
        assert str(found.status) == "READY"
        mlflow.set_tracking_uri(sqlite)
        try:
            return mlflow.pytorch.load_model(f"models:/{model_id}"), found.tags["rankzero.format"]
        finally:
            mlflow.set_tracking_uri(None)

    return log_and_load


def test_a_traced_model_takes_batches_of_any_size(log: Callable[..., Any]) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(4 * 36, 10)
    )
    loaded, kind = log(model, torch.randn(1, 1, 8, 8))
    assert kind == "pt2"
    assert model.training, "the model is left as it was"
    for size in (1, 2, 17):
        x = torch.randn(size, 1, 8, 8)
        torch.testing.assert_close(loaded(x), model.eval()(x))


def test_a_model_that_cannot_be_traced_is_pickled(log: Callable[..., Any]) -> None:
    loaded, kind = log(Branching(), torch.randn(4, 3))
    assert kind == "pickle"
    assert loaded(torch.randn(2, 3)).shape == (2, 3)


class Lightning(Branching):
    """Has what RankZero uses of a LightningModule, and keeps its data."""

    automatic_optimization, trainer = True, None

    def setup(self, stage: str) -> None:
        self.train_set = TensorDataset(torch.zeros(100_000))
        self.sets = {"train": self.train_set, "rate": 0.5}
        self.loader = DataLoader(self.train_set)

    def log(self, name: str, value: Any) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> None: ...

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def test_a_pickled_model_has_no_data_and_nothing_of_its_training(log: Callable[..., Any]) -> None:
    module = Lightning()
    LightningSteps(module, TrainerStub(Train(batch_size=4), datamodule=module))
    loaded, kind = log(module, torch.randn(4, 3))
    assert kind == "pickle" and loaded(torch.randn(2, 3)).shape == (2, 3)
    assert vars(loaded).keys().isdisjoint({"train_set", "loader", "trainer", "log"})
    assert loaded.sets == {"train": None, "rate": 0.5}
    assert len(module.sets["train"]) == 100_000, "the model is left as it was"


class Named(Lightning):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, : len(self.train_set.tensors)]


def test_a_model_whose_forward_reads_its_data_keeps_them(log: Callable[..., Any]) -> None:
    (module := Named()).setup("fit")
    loaded, kind = log(module, torch.randn(4, 3))
    assert kind == "pickle" and loaded(torch.randn(2, 3)).shape == (2, 1)


def test_several_inputs_and_other_types(log: Callable[..., Any]) -> None:
    loaded, kind = log(Pair(), (torch.randn(1, 3), torch.randn(1, 3)))
    assert (kind, loaded(torch.ones(5, 3), torch.ones(5, 3)).shape) == ("pt2", (5, 3))
    loaded, kind = log(nn.Embedding(7, 3), torch.randint(0, 7, (2, 5)))
    assert (kind, loaded(torch.randint(0, 7, (9, 5))).shape) == ("pt2", (9, 5, 3))


def test_incomplete_upload_is_not_the_best_model(sqlite: str, tmp_path: Path) -> None:
    tracker, folder = MlflowRuns(sqlite), make_folder(tmp_path, sqlite)
    run = tracker.open_run(folder.identity, T0)
    tags = {"rankzero.model": "best", "rankzero.step": "9"}
    tracker._client.create_logged_model(
        run.experiment_id,
        name="best_model",
        source_run_id=run.run_id,
        tags=tags,
        model_type="pytorch",
    )
    assert tracker.models.best_model(run) is None
    with mlflow_model.saved(nn.Linear(3, 3), torch.randn(2, 3)) as (saved, _):
        whole = tracker.models.log_model(run, saved, "best_model", 9, tags)
    assert tracker.models.best_model(run) == whole
    assert [model.model_id for model in tracker.models.of_run(run, "pytorch")] == [whole], (
        "what was left is gone"
    )

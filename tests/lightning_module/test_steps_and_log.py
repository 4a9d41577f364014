"""Values that a module's steps return and log become metrics; arguments become settings."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

from rankzero import Train
from rankzero.errors import UserError
from rankzero.lightning_module import init_arguments
from rankzero.lightning_module.steps_and_log import LightningSteps, TrainerStub, metrics_of

LOSS = torch.tensor(2.0)


def test_training_step_gives_its_loss_and_logged_metrics() -> None:
    logged = {"train_loss": LOSS, "train_accuracy": torch.tensor([0.5]), "grad": 3}
    found = metrics_of({"loss": LOSS, "preds": [1]}, logged, training=True)
    assert found["loss"] is LOSS
    assert {name: float(value) for name, value in found.items()} == {
        "loss": 2.0,
        "accuracy": 0.5,
        "grad": 3.0,
    }
    assert all(value.dim() == 0 for value in found.values())


def test_logged_tensor_on_the_host_is_moved_to_the_loss() -> None:
    loss = torch.tensor(2.0, device="meta")
    found = metrics_of(loss, {"n": torch.tensor([3]), "f1": torch.tensor(0.5)}, training=True)
    assert {one.device.type for one in found.values()} == {"meta"}


def test_validation_step_may_log_or_return_its_loss() -> None:
    assert float(metrics_of(None, {"val_loss": LOSS, "val/f1": 0.5}, training=False)["loss"]) == 2.0
    assert metrics_of(LOSS, {"val_acc": 0.5}, training=False)["loss"] is LOSS
    # It may return something else, such as an accuracy.
    other = torch.tensor(0.75)
    assert float(metrics_of(other, {"val_loss": LOSS}, training=False)["loss"]) == 2.0


@pytest.mark.parametrize(
    ("training", "message"), [(True, "must return the loss"), (False, "must log val_loss")]
)
def test_step_without_a_loss_is_refused(training: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        metrics_of(None, {"acc": 0.5}, training=training)


class Kept(nn.Module):
    """As a metric of torchmetrics that keeps all outputs, such as Spearman's."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.kept: list[torch.Tensor] = []
        self._forward_cache: torch.Tensor | None = None

    def update(self, outputs: torch.Tensor) -> None:
        self.kept.append(outputs)

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        self.update(outputs)
        self._forward_cache = outputs.mean()
        return self._forward_cache


class Measured(nn.Module):
    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.score, self.updated = Kept(), Kept()

    def setup(self, stage: str) -> None: ...

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.score(batch)
        self.updated.update(batch)
        self.log("train_score", self.score)
        return batch.sum()

    validation_step = training_step


def test_metric_keeps_the_outputs_of_one_step() -> None:
    module = Measured()
    steps = LightningSteps(module, TrainerStub(Train(batch_size=2)))
    steps.trainer.batch_index = 0
    for value in (1.0, 3.0):
        assert float(steps(torch.full((2,), value))["score"]) == value
        assert not module.score.kept
    assert len(module.updated.kept) == 2, "a module may collect what it computes later"
    with pytest.raises(UserError, match=r"log\('val/f1'\): .* not its update"):
        metrics_of(torch.ones(()), {"val/f1": module.updated}, training=False)


class Base:
    def __init__(
        self,
        width: int = 8,
        learning_rate: float = 0.5,
        act: Literal["relu", "gelu"] = "relu",
        extra: Any = None,
        depth: int = None,  # type: ignore[assignment]  # noqa: RUF013
        data: str = "x",
        batch_size: int = 32,
        **rest: Any,
    ) -> None:
        self.got = (width, learning_rate, act, extra, data, batch_size, rest)


def test_arguments_with_a_text_form_are_settings() -> None:
    fields = init_arguments.fields_of([Base])
    assert fields == {
        "width": (int, 8),
        "act": (Literal["relu", "gelu"], "relu"),
        "depth": (int | None, None),
        "data_": (str, "x"),
    }
    assert init_arguments.learning_rate(Base) == 0.5
    arguments = init_arguments.parameters(Base)
    assert arguments["batch_size"].default == 32 and "rest" not in arguments


def test_missing_default_or_learning_rate_is_refused() -> None:
    class Needs:
        def __init__(self, classes: int, lr: float = 0.1) -> None: ...

    class Rateless:
        def __init__(self, width: int = 3) -> None: ...

    with pytest.raises(UserError, match="give classes a default value"):
        init_arguments.fields_of([Needs])
    with pytest.raises(UserError, match="has no learning rate"):
        init_arguments.learning_rate(Rateless)
    with pytest.raises(UserError, match="a hook"):
        init_arguments.learning_rate(Rateless, ["", "a hook"])

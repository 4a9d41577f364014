"""Values that a module's steps return and log become metrics; arguments become settings."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from rankzero.errors import UserError
from rankzero.lightning_module import init_arguments
from rankzero.lightning_module.steps_and_log import metrics_of

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


class Base:
    def __init__(
        self,
        width: int = 8,
        learning_rate: float = 0.5,
        act: Literal["relu", "gelu"] = "relu",
        extra: Any = None,
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

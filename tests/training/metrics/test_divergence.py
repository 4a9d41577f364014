"""A loss that is no finite number: it ends the run if a weight is none either, or if it stays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero.errors import NotFinite
from rankzero.events import Noticed
from support.training import Trainer, tiny


class Gaps(type(tiny())):  # type: ignore[misc]
    """Some steps know no target, as `loss[known].mean()` of a batch from a power cut."""

    unknown: tuple[int, ...] = ()
    infinite: bool = False

    def measure(self, model: Any, batch: Any, at: Any) -> Any:
        measured = super().measure(model, batch)
        if at.training and at.step in self.unknown:
            logits = model(batch[0])
            nothing = logits[logits.isnan()]
            # A mean of nothing has gradients of 0.
            measured["loss"] = logits.sum() / 0 if self.infinite else nothing.square().mean()
        return measured


def gaps(*unknown: int, **changes: Any) -> Any:
    given = vars(tiny(train__steps=40, train__log_every=1)) | changes
    return Gaps(**given | {"unknown": unknown})


def test_a_loss_that_is_nan_in_some_steps_is_told_once(train: Trainer) -> None:
    trained = train(gaps(4, *range(10, 29)))
    texts = [event.text for event in trained.events if isinstance(event, Noticed)]
    assert texts == [
        "train/loss is not finite at step 5, but every weight is: the training continues"
    ]
    assert trained.state.step == 40


def test_a_loss_that_stays_nan_ends_the_run(train: Trainer) -> None:
    with pytest.raises(NotFinite, match=r"in 20 reports in a row: lower lr, or set train\.clip$"):
        train(gaps(*range(10, 40)))


@pytest.mark.parametrize("log_every", [2, 3])
def test_a_loss_that_is_nan_in_each_second_step_trains_on(train: Trainer, log_every: int) -> None:
    every = vars(tiny(train__steps=60, train__log_every=log_every))
    assert train(Gaps(**every | {"unknown": tuple(range(1, 60, 2))})).state.step == 60


class Averaging(Gaps):
    """Has a running mean that is NaN after a harmless step, as that of a BatchNorm."""

    def model(self) -> Any:
        model = super().model()
        model.register_buffer("mean", torch.zeros(1))
        return model

    def measure(self, model: Any, batch: Any, at: Any) -> Any:
        model.mean.fill_(math.nan if at.step in self.unknown else 0)
        return super().measure(model, batch, at)


def test_a_statistic_that_is_nan_ends_the_run_at_once(train: Trainer) -> None:
    with pytest.raises(NotFinite, match="train/loss is not finite at step 5: lower lr"):
        train(Averaging(**vars(gaps(4))))


def test_a_weight_that_is_not_finite_ends_the_run_at_once(train: Trainer) -> None:
    with pytest.raises(NotFinite, match="train/loss is not finite at step 5: lower lr"):
        train(gaps(4, infinite=True))


class Overflowing(Gaps):
    """Has a finite loss, and no finite gradient, in some steps."""

    def measure(self, model: Any, batch: Any, at: Any) -> Any:
        measured = super(Gaps, self).measure(model, batch)
        if at.step in self.unknown:
            measured["loss"] = measured["loss"] + (0 * model(batch[0])).sum().sqrt()
        return measured


def test_a_gradient_that_is_never_finite_ends_the_run(train: Trainer, tmp_path: Path) -> None:
    every = vars(tiny(train__steps=40, train__log_every=1, train__precision="fp16"))
    assert train(Overflowing(**every | {"unknown": range(5)})).state.step == 40
    with pytest.raises(NotFinite, match=r"loss scale of fp16 is 7\.6e-06 at step 33, because"):
        train(Overflowing(**every | {"unknown": range(40)}), tmp_path / "never")

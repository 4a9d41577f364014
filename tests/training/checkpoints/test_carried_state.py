"""A state that is carried from batch to batch: a resume within an epoch names it."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankzero import Experiment
from rankzero.events import Noticed
from rankzero.training.checkpoints import carried_state
from support.training import Trained, Trainer, tiny

TINY: Any = type(tiny())


class Remembering(nn.Module):
    """Remembers as `kind` says: the last batch, a table, a result of the step, or nothing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.memory = kind, nn.Linear(8, 2), torch.zeros(())
        self.calls, self.odd = 0, float("nan")
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        if self.kind == "table" and not self.memory.dim():
            self.memory = torch.ones(2)
        if self.kind == "inference":
            with torch.inference_mode():
                self.memory = self.memory if self.memory.dim() else torch.ones(2)
        if self.kind == "result":
            self.memory = y.sum()
        if self.kind == "replaced":
            self.memory = x.mean()
        if self.kind == "unsaved":
            self.hidden = x.mean()
        if self.kind == "unsaved table" and not self.hidden.dim():
            self.hidden = torch.ones(2)
        if self.kind == "counted":
            self.calls += 1
        if self.kind == "written":
            self.memory.add_(x.mean())
        return y


class Sharded(Remembering):
    """Of a class as `fully_shard` makes it."""

    __module__ = "torch.distributed.fsdp._fully_shard._fully_shard"


class Saving(Remembering):
    def get_extra_state(self) -> Tensor:
        return self.memory

    def set_extra_state(self, state: Tensor) -> None:
        self.memory = state


class Carrying(TINY):  # type: ignore[misc]
    kind: str = "replaced"

    def model(self) -> nn.Module:
        if self.kind == "sharded":
            return Sharded("counted")
        return Saving("written") if self.kind == "saved" else Remembering(self.kind)

    def measure(self, model: Any, batch: Any) -> Mapping[str, Any]:
        if self.kind == "kept by the experiment":
            vars(self)["hidden"] = [batch[0].mean()]
        measured: Mapping[str, Any] = super().measure(model, batch)
        return measured


def resumed(train: Trainer, folder: Path, kind: str, stop_at: int) -> list[str]:
    experiment: Experiment = Carrying(
        **{**vars(tiny(train__steps=12, train__log_every=1)), "kind": kind}
    )
    train(experiment, folder, stop_at=stop_at)
    trained: Trained = train(experiment, folder)
    return [event.text for event in trained.events if isinstance(event, Noticed)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("replaced", "model.memory"),
        ("written", "model.memory"),
        ("unsaved", "model.hidden"),
        ("counted", "model.calls"),
        ("sharded", "model.calls"),
        ("kept by the experiment", "experiment.hidden"),
    ],
)
def test_resume_within_an_epoch_names_what_it_lacks(
    train: Trainer, tmp_path: Path, kind: str, name: str
) -> None:
    (text,) = resumed(train, tmp_path, kind, 8)
    assert text.startswith(f"{name} changes with each batch") and "not exact" in text


@pytest.mark.parametrize(
    "kind", ["nothing", "table", "unsaved table", "inference", "result", "saved"]
)
def test_what_a_resume_has_again_is_not_named(train: Trainer, tmp_path: Path, kind: str) -> None:
    assert not resumed(train, tmp_path, kind, 8)


def test_resume_between_epochs_is_not_watched(train: Trainer, tmp_path: Path) -> None:
    assert not resumed(train, tmp_path, "replaced", 5)  # of six


def test_watching_holds_no_batch(train: Trainer, tmp_path: Path) -> None:
    experiment = tiny(train__steps=12)
    train(experiment, tmp_path, stop_at=8)
    trained = train(experiment, tmp_path)
    state = dataclasses.replace(trained.state, step=8)
    alive: list[Any] = []

    def made(_: int) -> Tensor:
        assert all(one() is None for one in alive)
        batch = torch.zeros(1)
        alive.append(weakref.ref(batch))
        return batch

    watched = carried_state.watch(map(made, range(5)), trained.job, state, print)
    while next(watched, None) is not None:
        pass
    assert len(alive) == 5


def test_watching_holds_nothing_of_an_attribute_after_its_look(
    train: Trainer, tmp_path: Path
) -> None:
    experiment: Any = Carrying(**vars(tiny(train__steps=12)))
    train(experiment, tmp_path, stop_at=8)
    trained = train(experiment, tmp_path)
    state = dataclasses.replace(trained.state, step=8)
    model: Any = state.model
    # A long table costs little.
    model.table = list(range(3_000_000))
    watched = carried_state.watch(iter(range(5)), trained.job, state, lambda _: None)
    model.memory = torch.zeros(3)
    next(watched), next(watched)
    former = weakref.ref(model.memory)
    begun = time.process_time()
    model.memory = torch.zeros(3)
    next(watched)
    assert former() is None and time.process_time() - begun < 0.2


class Teaching(TINY):  # type: ignore[misc]
    """Moves a teacher as `how` says."""

    how: str = "nothing"

    def helpers(self) -> Mapping[str, nn.Module]:
        return {"teacher": self.model()}

    def measure(self, model: Any, batch: Any, at: Any) -> Mapping[str, Any]:
        pairs = zip(at.helpers["teacher"].parameters(), model.parameters(), strict=True)
        for mine, other in pairs if at.training else ():
            if self.how == "data":
                mine.data.mul_(0.9).add_(0.1 * other.data)
            elif self.how == "in place":
                with torch.no_grad():
                    mine.lerp_(other, 0.1)
        measured: Mapping[str, Any] = super().measure(model, batch)
        return measured


@pytest.mark.parametrize(("how", "is_named"), [("in place", 1), ("data", 1), ("nothing", 0)])
@pytest.mark.parametrize("micro_batch", [32, 8])
def test_a_helper_that_measure_changes_is_named_in_the_first_attempt(
    train: Trainer, how: str, is_named: int, micro_batch: int
) -> None:
    settings = vars(tiny(train__steps=3, train__micro_batch=micro_batch))
    trained = train(Teaching(**{**settings, "how": how}))
    texts = [event.text for event in trained.events if isinstance(event, Noticed)]
    assert len(texts) == is_named
    assert all(
        "helpers()['teacher'] is changed by measure()" in text
        and "belongs in the model, with requires_grad_(False)" in text
        for text in texts
    )


class Unusual(nn.Module):
    """A helper with tensors that have no corner, and a table that is made again for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("kept_table", torch.ones(2))


class HelpedByUnusual(TINY):  # type: ignore[misc]
    def helpers(self) -> Mapping[str, nn.Module]:
        return {"odd": Unusual()}

    def measure(self, model: Any, batch: Any, at: Any) -> Mapping[str, Any]:
        helper = at.helpers["odd"]
        helper.table, helper.kept_table = torch.full((2,), at.step), torch.ones(2)
        measured: Mapping[str, Any] = super().measure(model, batch)
        return measured


def test_a_helper_that_nobody_changes_may_have_any_tensor_and_make_a_table_again(
    train: Trainer,
) -> None:
    trained = train(HelpedByUnusual(**vars(tiny(train__steps=3))))
    assert not [event for event in trained.events if isinstance(event, Noticed)]

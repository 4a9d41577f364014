"""Conclusions from the history of evaluations: early stopping, and the plateau schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero.events import CheckpointSaved
from rankzero.training.build import build
from rankzero.training.checkpoints import restore
from rankzero.training.periodic import state_dict
from support.training import ALONE, Trainer, tiny, weights

STUCK: dict[str, Any] = {
    "lr": 1e-30,
    "train__steps": 60,
    "train__eval_every": 5,
    "train__log_every": 1,
}
"""The first evaluation, of step 5, stays the best."""


@pytest.mark.parametrize("stop_at", [None, 7, 15])
def test_patience_ends_the_training_at_the_same_step_with_a_checkpoint(
    train: Trainer, stop_at: int | None
) -> None:
    experiment = tiny(**STUCK, train__patience=3)
    if stop_at is not None:
        assert train(experiment, stop_at=stop_at, min_evaluation_seconds=0.0).state.step < 20
    trained = train(experiment)
    assert not trained.stopped and trained.state.step == 20
    assert [e.step for e in trained.events if isinstance(e, CheckpointSaved)][-1] == 20
    again = train(experiment)
    assert again.events == [] and again.state.step == 20, "it was complete"
    assert train(tiny(**STUCK, train__patience=4)).state.step == 25


def test_a_better_value_starts_the_count_again(train: Trainer) -> None:
    moving = {**STUCK, "lr": 0.05, "train__steps": 20, "train__patience": 2}
    trained = train(tiny(**moving, goal__metric="val/loss", goal__mode="min"))
    assert trained.state.step == 20 and trained.state.evaluations_since_best == 0


def test_the_learning_rate_falls_on_a_plateau_after_the_warm_up(train: Trainer) -> None:
    settings = {**STUCK, "lr": 1e-30, "train__warmup_steps": 3, "train__steps": 31}
    plateau = {"factor": 0.5, "patience": 2, "lowest": 0.25}
    trained = train(
        tiny(
            **settings,
            train__schedule="plateau",
            **{f"train__plateau__{name}": value for name, value in plateau.items()},
        )
    )
    expected = [0.25, 0.5, 0.75] + [1.0] * 12 + [0.5] * 10 + [0.25] * 6
    assert list(trained.series("lr").values()) == pytest.approx([1e-30 * one for one in expected])
    assert trained.state.lr_reductions == [0.5, 0.5]


@pytest.mark.parametrize("stop_at", [9, 10, 24])
def test_a_resumed_plateau_is_bit_for_bit_the_uninterrupted_one(
    train: Trainer, tmp_path: Path, stop_at: int
) -> None:
    settings = {"train__schedule": "plateau", "train__plateau__patience": 1, "dropout": 0.3}
    experiment = tiny(**{**STUCK, "lr": 0.3, "train__steps": 40}, **settings)
    straight = train(experiment, tmp_path / "straight")
    assert len(straight.state.lr_reductions) > 1
    first = train(experiment, tmp_path / "parts", stop_at=stop_at, min_evaluation_seconds=0.0)
    second = train(experiment, tmp_path / "parts")
    for name in ("lr", "train/loss"):
        assert {**first.series(name), **second.series(name)} == straight.series(name)
    assert all(map(torch.equal, weights(straight), weights(second)))


def test_another_schedule_drops_the_reductions_of_a_plateau(train: Trainer, tmp_path: Path) -> None:
    settings = {**STUCK, "lr": 1e-30, "train__steps": 30, "train__plateau__patience": 1}
    reduced = train(tiny(**settings, train__schedule="plateau")).state
    job, state = build(tiny(**settings), ALONE)
    notices: list[str] = []
    restore.newest(tmp_path / "checkpoints", job, state, notices.append)
    assert reduced.lr_reductions and not state.lr_reductions and state.base_lrs == [1e-30]
    assert len(notices) == 1 and "the learning rate is not reduced" in notices[0]


def test_checkpoints_of_earlier_versions_have_no_history(train: Trainer) -> None:
    trained = train(tiny(**STUCK, train__patience=3))
    old = state_dict(trained.job, trained.state)
    del old["evaluations_since_best"], old["lr_reductions"]
    trained.state.evaluations_since_best = 9
    restore.apply(old, trained.job, trained.state)
    assert trained.state.evaluations_since_best == 0


def test_another_goal_begins_without_a_best(train: Trainer, tmp_path: Path) -> None:
    goal = {"goal__metric": "val/loss", "goal__mode": "min"}
    first = train(tiny(**goal, train__steps=4, train__eval_every=2)).state
    assert first.best is not None
    job, state = build(tiny(train__steps=8), ALONE)
    notices: list[str] = []
    restore.newest(tmp_path / "checkpoints", job, state, notices.append)
    assert state.step == 4 and state.best is None and state.evaluations_since_best == 0
    assert len(notices) == 1 and "has another goal" in notices[0]

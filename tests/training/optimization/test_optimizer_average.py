"""An optimizer that averages the weights itself: its averages are evaluated, and are the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from rankzero.config import override
from rankzero.errors import UserError
from rankzero.events import Evaluated
from rankzero.training import final_test
from rankzero.training.build import build
from rankzero.training.checkpoints import restore
from rankzero.training.stop import StopRequest
from rankzero.training.strategies.replicated import _divided
from support.training import ALONE, Trained, Trainer, tiny, weights

_SHARE = 0.9


class Averaging(optim.Optimizer):
    """Schedule-free SGD with the contract of schedulefree's optimizers."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "steps": 0, "train_mode": False})

    @torch.no_grad()
    def _switch(self, mode: bool, share: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != mode else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], share)
            group["train_mode"] = mode

    def eval(self) -> None:
        self._switch(False, 1 - 1 / _SHARE)

    def train(self) -> None:
        self._switch(True, 1 - _SHARE)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "Please insert .train() and .eval() calls"
            group["steps"] += 1
            for parameter in group["params"]:
                state, part = self.state[parameter], 1 / group["steps"]
                z = state.setdefault("z", parameter.clone())
                parameter.lerp_(z, part)
                parameter.add_(parameter.grad, alpha=group["lr"] * (_SHARE * (1 - part) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])


class Free(type(tiny())):  # type: ignore[misc]
    parts: bool = False

    def optimizer(self, model: Any) -> Any:
        if not self.parts:
            return Averaging(model.parameters(), self.lr)
        head = optim.SGD(model[3].parameters(), lr=self.lr)
        return {"body": Averaging(model[0].parameters(), self.lr), "head": head}

    def test(self) -> Any:
        return self.data()[1]


def free(**changes: Any) -> Any:
    return override(Free(), {"train.steps": 12, "train.eval_every": 6, **changes})


def evaluations(trained: Trained) -> dict[int, float]:
    found = [event for event in trained.events if isinstance(event, Evaluated)]
    return {event.step: event.metrics["val/loss"] for event in found}


@pytest.mark.parametrize(
    ("parts", "strategy"), [(False, "single"), (True, "single"), (False, "fsdp"), (True, "fsdp")]
)
def test_the_averages_are_evaluated_and_a_resume_is_exact(
    train: Trainer, tmp_path: Path, parts: bool, strategy: str
) -> None:
    made = free(parts=parts, **{"train.strategy": strategy})
    straight = train(made, tmp_path / "straight")
    first = train(made, tmp_path / "parts", stop_at=6, min_evaluation_seconds=0.0)
    again = train(made, tmp_path / "parts")
    assert {**evaluations(first), **evaluations(again)} == evaluations(straight)
    assert all(map(torch.equal, weights(straight), weights(again)))
    saved = restore.load(tmp_path / "parts/checkpoints/step_00000012")
    model, other = made.model().eval(), made.model().eval()
    model.load_state_dict(saved["ema"])
    other.load_state_dict(saved["model"])
    losses = [made.measure(one, made.data()[1][:])["loss"].item() for one in (model, other)]
    assert evaluations(again)[12] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-4), "the averages are others"


def test_the_averages_of_the_best_checkpoint_are_tested(train: Trainer, tmp_path: Path) -> None:
    # So high a learning rate that the last evaluation is not the best.
    goal = {"goal.metric": "val/loss", "goal.mode": "min", "goal.target": None}
    trained = train(free(lr=30.0, **goal, **{"train.eval_every": 1}))
    sets = final_test.load_sets(trained.job.experiment, ALONE)
    tested = final_test.evaluate_best(
        trained.job, trained.state, sets, tmp_path / "checkpoints", StopRequest(), print
    )
    assert tested.step < 12
    assert tested.metrics["test/loss"] == pytest.approx(evaluations(trained)[tested.step], rel=1e-5)


def test_what_an_optimizer_that_averages_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="Averaging averages the weights itself: leave"):
        build(free(**{"train.ema": 0.9}), ALONE)
    with pytest.raises(UserError, match="zero1 cannot divide Averaging, which averages the"):
        _divided(Averaging(nn.Linear(2, 2).parameters(), 0.1))

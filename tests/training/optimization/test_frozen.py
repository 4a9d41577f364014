"""Parts of a model that are not trained in some epochs, and frozen helpers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankzero import UserError
from rankzero.events import Noticed
from rankzero.experiment import Experiment
from rankzero.training.build import build
from rankzero.training_position import Progress
from support.training import ALONE, Trained, Trainer, tiny, weights
from support.two_ranks import STAGED, layered

STEPS_OF_AN_EPOCH = 6


def staged(**changes: Any) -> Experiment:
    """Return an experiment that freezes its first layers in epoch 0, of 6 steps."""
    return layered(STAGED, **{"frozen_parts": "0,2", "train__strategy": "single"} | changes)


def notices(trained: Trained) -> list[str]:
    return [event.text for event in trained.events if isinstance(event, Noticed)]


def test_frozen_modules_do_not_move_until_their_epoch(train: Trainer, tmp_path: Path) -> None:
    """Not even by weight decay."""
    strong = {"weight_decay": 3.0}
    before = build(staged(), ALONE)[1].model.state_dict()
    held = train(staged(train__steps=STEPS_OF_AN_EPOCH, **strong), tmp_path / "held")
    thawed = train(staged(train__steps=STEPS_OF_AN_EPOCH + 1, **strong), tmp_path / "thawed")
    for name, trained in (("0.weight", False), ("2.bias", False), ("6.weight", True)):
        moved = not torch.equal(held.state.model.state_dict()[name], before[name])
        assert moved == trained, name
    assert not torch.equal(thawed.state.model.state_dict()["0.weight"], before["0.weight"])
    assert notices(held) == ["epoch 0 does not train 0, 2"]
    assert notices(thawed) == [*notices(held), "epoch 1 begins to train 0, 2"]


@pytest.mark.parametrize("stop_at", [3, 6, 7])
def test_a_resume_across_the_change_is_bit_identical(
    train: Trainer, tmp_path: Path, stop_at: int
) -> None:
    straight = train(staged(), tmp_path / "straight")
    stopped = train(staged(), tmp_path / "stopped", stop_at=stop_at)
    again = train(staged(), tmp_path / "stopped")
    assert all(
        torch.equal(one, two) for one, two in zip(weights(straight), weights(again), strict=True)
    )
    assert notices(stopped) + notices(again) == notices(straight), "each change is reported once"


def test_a_training_that_is_complete_begins_no_epoch(train: Trainer, tmp_path: Path) -> None:
    class Planned(type(staged())):  # type: ignore[misc]
        def frozen(self, epoch: int) -> list[str]:
            return (["0"], [])[epoch]

    experiment = Planned(**vars(staged(train__steps=2 * STEPS_OF_AN_EPOCH)))
    assert len(notices(train(experiment, tmp_path))) == 2
    again = train(experiment, tmp_path)
    assert again.state.step == 2 * STEPS_OF_AN_EPOCH and not again.events


def test_what_the_model_itself_froze_stays_frozen(train: Trainer, tmp_path: Path) -> None:
    class Partly(type(staged())):  # type: ignore[misc]
        def model(self) -> Any:
            model = super().model()
            model[0].requires_grad_(False)
            return model

    trained = train(Partly(**vars(staged())), tmp_path)
    model = trained.state.model
    assert [model[0].weight.requires_grad, model[2].weight.requires_grad] == [False, True]  # type: ignore[index]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("0,layer3", "names 'layer3', which is no module of the model: did you mean"),
        ("6.weight", "did you mean '6'"),
        ("0,2,3,6", "leaves no parameter to train"),
    ],
)
def test_wrong_names_are_refused_before_training(parts: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(staged(frozen_parts=parts), ALONE)


def test_a_tied_weight_is_frozen_by_each_of_its_names() -> None:
    job, state = build(staged(tied=True, frozen_parts="6"), ALONE)
    assert not state.model[2].weight.requires_grad  # type: ignore[index]
    assert state.model[2].bias.requires_grad  # type: ignore[index]
    assert not job.frozen_parts.wrongly_set(state.model)


class Helped(type(staged())):  # type: ignore[misc]
    def measure(self, model: Any, batch: Any, at: Progress) -> Any:
        teacher = at.helpers["teacher"]
        assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
        return super().measure(model, batch, at)


def test_helpers_leave_the_model_as_it_is_and_no_checkpoint_has_them(
    train: Trainer, tmp_path: Path
) -> None:
    class Unhelped(Helped):
        def helpers(self) -> Any:
            return {}

    helped, alone = (build(kind(**vars(staged())), ALONE)[1] for kind in (Helped, Unhelped))
    assert all(map(torch.equal, helped.model.parameters(), alone.model.parameters()))
    trained = train(Helped(**vars(staged())), tmp_path)
    (saved,) = (tmp_path / "checkpoints").glob("step_*8/state.pt")
    assert torch.load(saved)["model"].keys() == trained.state.model.state_dict().keys()


def test_a_module_stays_in_evaluation_mode_if_train_is_overridden(train: Trainer) -> None:
    class Still(nn.Sequential):
        def train(self, mode: bool = True) -> Still:
            super().train(mode)
            self[0].eval()
            return self

    class Normed(type(layered())):  # type: ignore[misc]
        def model(self) -> nn.Module:
            return Still(nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    model: Any = train(Normed(**vars(layered(train__strategy="single")))).state.model
    assert [int(model[place].num_batches_tracked) for place in (0, 1)] == [0, 8]


def test_a_helper_that_is_no_module_is_refused() -> None:
    class Wrong(Helped):
        def helpers(self) -> Any:
            return {"teacher": nn.Linear}

    with pytest.raises(UserError, match="'teacher' is a type"):
        build(Wrong(**vars(staged())), ALONE)


def test_a_program_of_torch_export_may_be_a_helper(train: Trainer) -> None:
    class Taught(type(tiny())):  # type: ignore[misc]
        def helpers(self) -> dict[str, nn.Module]:
            x = torch.zeros(32, 8)
            return {"teacher": torch.export.export(self.model().eval(), (x,)).module()}

        def measure(self, model: Any, batch: Any, at: Any) -> Any:
            measured = super().measure(model, batch)
            return measured | {"taught": at.helpers["teacher"](batch[0][:1].expand(32, -1)).mean()}

    trained = train(Taught(**vars(tiny(train__steps=2))))
    assert trained.state.step == 2
    assert not any(one.requires_grad for one in trained.job.helpers["teacher"].parameters())

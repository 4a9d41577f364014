"""Averaged weights on one process: their formula, and where they are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankzero.ranks import Ranks
from rankzero.training.build import build
from rankzero.training.checkpoints import restore
from rankzero.training.distributed.world import World
from support.training import Trainer, tiny, weights

WORLD = World(Ranks(), torch.device("cpu"))


def test_average_follows_its_formula() -> None:
    _, state = build(tiny(train__ema=0.5), WORLD)
    weight, average = next(state.model.parameters()), state.average
    assert average is not None
    wanted = weight.detach().clone()
    for step in range(1, 20):
        with torch.no_grad():
            weight.fill_(step)
        average.update(step)
        wanted.lerp_(weight.detach(), 1 - min(0.5, (1 + step) / (10 + step)))
    with state.weights_to_evaluate():
        assert torch.allclose(weight, wanted)
    assert torch.equal(weight, torch.full_like(weight, 19.0))


def test_averages_are_evaluated_and_the_training_is_left_alone(
    train: Trainer, tmp_path: Path
) -> None:
    averaged = train(tiny(train__ema=0.9), tmp_path / "averaged")
    plain = train(tiny(), tmp_path / "plain")
    assert averaged.series("train/loss") == plain.series("train/loss")
    assert averaged.totals.last_metrics != plain.totals.last_metrics
    saved = restore.load(next((tmp_path / "averaged" / "checkpoints").glob("step_*24")))
    model = tiny().model().eval()
    model.load_state_dict(saved["ema"])
    _, val = tiny().data()
    wanted = tiny().measure(model, val[:])["loss"].item()
    assert averaged.totals.last_metrics["val/loss"] == pytest.approx(wanted, rel=1e-5)


def test_an_error_in_an_evaluation_leaves_the_trainings_weights() -> None:
    _, state = build(tiny(train__ema=0.5), WORLD)
    before = [weight.detach().clone() for weight in state.model.parameters()]
    assert state.average is not None
    state.average.update(1)
    with pytest.raises(KeyError), state.weights_to_evaluate():
        raise KeyError
    assert all(map(torch.equal, before, state.model.parameters()))


def test_an_average_starts_at_a_checkpoint_that_has_none(train: Trainer, tmp_path: Path) -> None:
    stopped = train(tiny(), tmp_path, stop_at=12)
    job, state = build(tiny(train__ema=0.9), WORLD)
    notices: list[str] = []
    restore.newest(tmp_path / "checkpoints", job, state, notices.append)
    (notice,) = notices
    assert notice.endswith("no averaged weights: the average of train.ema starts there")
    with state.weights_to_evaluate():
        assert all(map(torch.equal, weights(stopped), state.model.parameters()))


def test_an_average_that_is_dropped_is_a_notice(train: Trainer, tmp_path: Path) -> None:
    train(tiny(train__ema=0.9), tmp_path, stop_at=12)
    notices: list[str] = []
    restore.newest(tmp_path / "checkpoints", *build(tiny(), WORLD), notices.append)
    assert len(notices) == 1 and "dropped, because train.ema is not set" in notices[0]


@pytest.mark.parametrize("decay", [0.0, 1.0, 1.5])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"ema: must be"):
        tiny(train__ema=decay)

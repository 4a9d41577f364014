"""Averaged weights on one process: their formula, and where they are used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rankzero import config
from rankzero.training.build import build
from rankzero.training.checkpoints import restore
from rankzero.training.optimization.averaged_weights import AveragedWeights
from rankzero.training.strategies.base import Strategy
from support.training import ALONE, Trainer, tiny, weights


def test_average_follows_its_formula() -> None:
    _, state = build(tiny(train__ema=0.5), ALONE)
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


class Halves(type(tiny())):  # type: ignore[misc]
    def model(self) -> Any:
        return super().model().bfloat16()

    def measure(self, model: Any, batch: Any) -> Any:
        return super().measure(model, [batch[0].bfloat16(), batch[1]])


def halves(**changes: Any) -> Any:
    return config.override(Halves(), {f"train.{name}": value for name, value in changes.items()})


def test_the_average_of_a_bf16_model_moves_by_less_than_a_rounding() -> None:
    _, state = build(halves(ema=0.999), ALONE)
    weight, average = next(state.model.parameters()), state.average
    assert average is not None
    with torch.no_grad():
        weight.fill_(1.0)
        average.restart()
        weight.fill_(2.0)
    for step in range(20_000, 21_000):
        average.update(step)
        if step == 20_500:
            with state.weights_to_evaluate():
                assert not torch.equal(weight, torch.full_like(weight, 2.0))
    assert torch.equal(weight, torch.full_like(weight, 2.0))
    with state.weights_to_evaluate():
        assert weight.mean().item() == pytest.approx(2 - 0.999**1000, abs=0.01)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_bf16_models_averages_are_resumed_bit_for_bit(
    train: Trainer, tmp_path: Path, is_old: bool
) -> None:
    trained = train(halves(ema=0.99), tmp_path).state
    saved = restore.load(next((tmp_path / "checkpoints").glob("step_*24")))
    if is_old:
        del saved["ema_rests"]
    job, state = build(halves(ema=0.99), ALONE)
    restore.apply(saved, job, state)
    assert state.average is not None and trained.average is not None
    pairs = list(zip(state.average._averages, trained.average._averages, strict=True))
    wanted = [two.bfloat16().float() if is_old else two for _, two in pairs]
    assert all(torch.equal(one, two) for (one, _), two in zip(pairs, wanted, strict=True))
    assert all(map(torch.equal, state.model.parameters(), trained.model.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_halves_are_saved_without_a_loss(dtype: torch.dtype) -> None:
    """Also of weights that are so small that their rests are below fp16's exponents."""
    model = torch.nn.Linear(64, 64).to(dtype)
    strategy = SimpleNamespace(
        weights=lambda: [one.detach() for one in model.parameters()],
        model_state=model.state_dict,
        load_model=model.load_state_dict,
    )
    made = [AveragedWeights(cast(Strategy, strategy), model, 0.999) for _ in range(2)]
    for average in made[0]._averages:
        average.copy_(0.02 * torch.randn_like(average))
    saved = made[0].state()
    made[1].load(saved["ema"], saved["ema_rests"])
    assert all(map(torch.equal, made[0]._averages, made[1]._averages))


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


class Merged(torch.nn.Linear):
    """Adds its adapter to its weight in eval(), as loralib does."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.adapter = torch.nn.Parameter(torch.zeros(3, 8))

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            self.weight.data.add_(self.adapter.data, alpha=-1 if mode else 1)
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + self.adapter if self.training else self.weight
        return torch.nn.functional.linear(x.flatten(1)[:, :8], weight, self.bias)


class Adapted(type(tiny())):  # type: ignore[misc]
    def model(self) -> Any:
        return Merged()


def test_a_module_that_merges_in_eval_merges_the_averages(train: Trainer, tmp_path: Path) -> None:
    trained = train(config.override(Adapted(), {"train.ema": 0.9}), tmp_path)
    saved = restore.load(next((tmp_path / "checkpoints").glob("step_*24")))
    model = Merged()
    model.load_state_dict(saved["ema"])
    _, val = trained.job.experiment.data()
    wanted = trained.job.experiment.measure(model.eval(), val[:])["loss"].item()
    assert trained.totals.last_metrics["val/loss"] == pytest.approx(wanted, rel=1e-5)


class Lazy(type(tiny())):  # type: ignore[misc]
    def model(self) -> Any:
        return torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyLinear(2))


def test_the_averages_of_lazy_modules_start_at_the_first_step(
    train: Trainer, tmp_path: Path
) -> None:
    made = config.override(Lazy(), {"train.ema": 0.9, "train.steps": 12})
    straight = train(made, tmp_path / "straight")
    train(made, tmp_path / "parts", stop_at=6)
    again = train(made, tmp_path / "parts")
    assert again.totals.last_metrics == straight.totals.last_metrics
    with again.state.weights_to_evaluate():
        averages = weights(again)
    assert not any(map(torch.equal, averages, weights(again)))


def test_an_error_in_an_evaluation_leaves_the_trainings_weights() -> None:
    _, state = build(tiny(train__ema=0.5), ALONE)
    before = [weight.detach().clone() for weight in state.model.parameters()]
    assert state.average is not None
    state.average.update(1)
    with pytest.raises(KeyError), state.weights_to_evaluate():
        raise KeyError
    assert all(map(torch.equal, before, state.model.parameters()))


def test_an_average_starts_at_a_checkpoint_that_has_none(train: Trainer, tmp_path: Path) -> None:
    stopped = train(tiny(), tmp_path, stop_at=12)
    job, state = build(tiny(train__ema=0.9), ALONE)
    notices: list[str] = []
    restore.newest(tmp_path / "checkpoints", job, state, notices.append)
    (notice,) = notices
    assert notice.endswith("no averaged weights: the average of train.ema starts there")
    with state.weights_to_evaluate():
        assert all(map(torch.equal, weights(stopped), state.model.parameters()))


def test_an_average_that_is_dropped_is_a_notice(train: Trainer, tmp_path: Path) -> None:
    train(tiny(train__ema=0.9), tmp_path, stop_at=12)
    notices: list[str] = []
    restore.newest(tmp_path / "checkpoints", *build(tiny(), ALONE), notices.append)
    assert len(notices) == 1 and "dropped, because train.ema is not set" in notices[0]


@pytest.mark.parametrize("decay", [0.0, 1.0, 1.5])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"ema: must be"):
        tiny(train__ema=decay)

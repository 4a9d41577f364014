"""Optimizers in turns, as in a GAN: on one and two ranks, under each strategy that takes them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.ranks import Ranks
from rankzero.training.distributed.world import World
from rankzero.training.optimization.optimizers import learning_rates, of, set_lr
from rankzero.training.strategies.base import Shard
from rankzero.training.strategies.replicated import Replicated
from support import two_ranks
from support.paths import FIXTURES
from support.two_ranks import Case, attempted_alone, launched, seen

ADVERSARIAL = FIXTURES / "adversarial.py"
STRATEGIES = ("ddp", "zero1", "fsdp")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"train__clip": 0.05, "train__log_gradient_norm": True},
    "divided": {"train__micro_batch": 4, "ratio": True},
    "fp16": {"train__precision": "fp16"},
    "repeated": {"repeats": 3, "train__clip": 0.5},
    "rest": {"train__drop_last": False, "train__micro_batch": 1},
}
AGAIN = {"again": "plain", "repeated-again": "repeated"}
ODD: dict[str, dict[str, Any]] = {
    "still": {"still": "generator", "train__precision": "fp16"},
    "rare": {"rare": True, "train__clip": 0.05},
    "held": {
        "still": "discriminator",
        "repeats": 2,
        "ratio": True,
        "train__precision": "fp16",
        "train__clip": 0.05,
    },
}
"""Turns in which a rank lacks gradients: all of them, one, and those without anything to train."""
ODD_CASES = [*itertools.product(("ddp", "zero1"), ODD), ("fsdp", "held")]


def case(name: str, stop_at: int | None = None, **changes: Any) -> Case:
    return Case(name, changes, stop_at, file=ADVERSARIAL)


def test_gradients_of_a_turn_are_averaged_without_a_copy_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, the host would wait for it in each turn."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    monkeypatch.setattr(dist, "all_reduce", lambda values: values.mul_(3))
    monkeypatch.setattr(Tensor, "new_tensor", lambda *_: pytest.fail("a copy from the host"))
    world = World(Ranks(0, 2), torch.device("cpu"))
    strategy = Replicated(model, model, optimizer, Shard(0, 2), world)
    strategy.average_gradients(optimizer)
    found = [p.grad.unique().tolist() for p in model.parameters() if p.grad is not None]
    assert found == [[1.5], [1.5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [
        case(f"{name}-{variant}", train__strategy=name, **changes)
        for name in STRATEGIES
        for variant, changes in VARIANTS.items()
    ]
    cases += [case(f"{name}-{odd}", train__strategy=name, **ODD[odd]) for name, odd in ODD_CASES]
    for again, variant in AGAIN.items():
        settings = VARIANTS[variant]
        cases += [
            case(f"{name}-{again}", 3, train__strategy=name, **settings) for name in STRATEGIES
        ]
    cases += [
        case("pp", train__strategy="pp"),
        case("ddp-static", train__ddp__static_graph=True),
        case("ddp-diverged", discriminator_lr=1e30),
    ]
    return launched(tmp_path_factory.mktemp("turns"), 2, cases)


def alone(
    folder: Path, name: str, stop_at: int | None = None, *, fails: bool = False, **changes: Any
) -> dict[str, Any]:
    found = attempted_alone(case(name, stop_at, **changes), folder / name)
    assert fails or "error" not in found, found["error"]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_take_the_turns_of_one(
    folder: Path, tmp_path: Path, name: str, variant: str
) -> None:
    one = alone(tmp_path, "one", **VARIANTS[variant])
    two = seen(folder, f"{name}-{variant}")
    # Half precision rounds the two halves of a batch differently.
    tolerance = 1e-3 if variant == "fp16" else 1e-4
    assert two["logged"].keys() == one["logged"].keys() >= {"train/generator/loss"}
    for metric in ("train/loss", "train/generator/loss", "train/discriminator/loss"):
        assert two["logged"][metric] == pytest.approx(one["logged"][metric], rel=tolerance), metric
    for step, metrics in one["evaluated"].items():
        assert two["evaluated"][step] == pytest.approx(metrics, rel=20 * tolerance)


@pytest.mark.parametrize(("name", "odd"), ODD_CASES)
def test_ranks_without_a_gradient_take_the_turn(
    folder: Path, tmp_path: Path, name: str, odd: str
) -> None:
    one, two = alone(tmp_path, "one", **ODD[odd]), seen(folder, f"{name}-{odd}")
    assert two["logged"].keys() == one["logged"].keys()
    for metric in ("train/generator/loss", "train/discriminator/loss"):
        assert two["logged"][metric] == pytest.approx(one["logged"][metric], rel=1e-3), metric


@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("name", STRATEGIES)
def test_resumed_turns_are_bit_identical(folder: Path, name: str, again: str) -> None:
    straight, resumed = seen(folder, f"{name}-{AGAIN[again]}"), seen(folder, f"{name}-{again}")
    assert resumed["begun"][1] >= 3 and resumed["logged"] == straight["logged"]


def test_turns_resume_bit_for_bit_on_one_process(tmp_path: Path) -> None:
    straight, again = alone(tmp_path, "straight"), alone(tmp_path, "again", 3)
    assert again["begun"][1] >= 3 and again["logged"] == straight["logged"]


def test_each_turn_trains_its_own_parameters_on_its_own_loss(tmp_path: Path) -> None:
    logged = alone(tmp_path, "turns", train__steps=1)["logged"]
    turns = [logged[f"train/{turn}/loss"][0] for turn in ("discriminator", "generator")]
    assert logged["train/loss"] == [sum(turns)]
    # The generator is judged by the discriminator that has just been trained.
    still = alone(tmp_path, "still", train__steps=1, discriminator_lr=1e-30)["logged"]
    assert still["train/discriminator/loss"] == logged["train/discriminator/loss"]
    assert still["train/generator/loss"] != logged["train/generator/loss"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_optimizer_takes_each_of_its_turns(tmp_path: Path, precision: str) -> None:
    settings = {"train__steps": 2, "train__precision": precision, "discriminator_lr": 0.01}
    losses = {
        (repeats, still): alone(
            tmp_path, f"{repeats}{still}", repeats=repeats, still=still, **settings
        )["logged"]
        for repeats in (1, 4)
        for still in ("", "discriminator")
    }
    once, four = (losses[repeats, ""]["train/discriminator/loss"][0] for repeats in (1, 4))
    assert four < once, "the last of four turns, after three steps"
    logged = losses[4, ""]
    parts = [logged[f"train/{name}/loss"] for name in ("discriminator", "generator")]
    assert logged["train/loss"] == [sum(two) for two in zip(*parts, strict=True)]
    # Without a trained parameter, more turns change nothing.
    assert losses[4, "discriminator"] == losses[1, "discriminator"]
    assert len(losses[4, "discriminator"]["train/generator/loss"]) == 2


def test_clipping_bounds_the_gradient_of_each_turn(tmp_path: Path) -> None:
    logged = alone(tmp_path, "clipped", **VARIANTS["clipped"])["logged"]
    norms = [logged[f"train/{turn}/gradient_norm"] for turn in ("discriminator", "generator")]
    assert len(norms[0]) == len(norms[1]) == 8 and norms[0] != norms[1]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pp", "pp takes one optimizer, and optimizer() returned 2"),
        ("ddp-static", "leave the settings of train.ddp out"),
    ],
)
def test_what_turns_cannot_do_is_refused(folder: Path, name: str, says: str) -> None:
    error = seen(folder, name, fails=True)["error"]
    assert error.startswith("UserError: ") and says in error


def test_turns_whose_weights_are_nan_end_before_a_checkpoint_has_them(
    folder: Path, tmp_path: Path
) -> None:
    two = seen(folder, "ddp-diverged", fails=True)
    for found in (two, alone(tmp_path, "one", fails=True, discriminator_lr=1e30)):
        assert found["error"].startswith("NotFinite: train/loss is not finite at step ")
    assert not [*folder.glob("ddp-diverged/checkpoints/step_*"), *tmp_path.rglob("step_*")]


def test_turns_need_an_optimizer_each(tmp_path: Path) -> None:
    found = alone(tmp_path, "one", fails=True, given="one")
    assert "turns names discriminator, generator, but optimizer() returns one" in found["error"]


def test_schedule_gives_each_optimizer_a_factor() -> None:
    experiment: Any = two_ranks.layered(ADVERSARIAL, decay=0.5)
    optimizer = of(experiment, experiment.model())
    set_lr(optimizer, [0.01, 0.1], experiment.schedule(2, 8))
    assert [group["lr"] for group in optimizer.param_groups] == [0.0025, 0.1]
    assert learning_rates(optimizer) == {
        "lr": 0.0025,
        "lr/generator": 0.0025,
        "lr/discriminator": 0.1,
    }
    with pytest.raises(UserError, match="returned factors for critic, but"):
        set_lr(optimizer, [0.01, 0.1], {"critic": 1.0})

"""Metrics that are sums: the same on any number of ranks, for any size of the batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero.ranks import Ranks
from rankzero.training.distributed.world import World
from support import two_ranks
from support.two_ranks import TOKENS, Case, attempted_alone, launched, seen

STILL = {"lr": 0.0, "train__steps": 1}
"""Every evaluation is of the same weights."""
REST = {"kept": 25, "train__drop_last": False}
"""Each third batch is a single sample, so rank 1 has none."""
LENGTH = "'length' is missing on rank 1"
SIZE = "'size' is missing on rank 0"
DIFFERS = {
    "names": f"{LENGTH}, {SIZE}",
    "more": SIZE,
    "shape": "'recall' has the shapes [2, 11] and [2, 12]",
    "evaluated": f"{LENGTH}, {SIZE}",
}
"""How rank 1's metrics differ, and what the error says."""
TRAINED: dict[str, dict[str, Any]] = {
    "ddp": {"train__micro_batch": 2},
    "zero1": {},
    "fsdp": {"train__micro_batch": 2},
    "tp": {},
    "pp": {"train__micro_batch": 2},
}


def case(name: str, stop_at: int | None = None, **changes: Any) -> Case:
    strategy = name.split("-")[0]
    settings = {"train__strategy": strategy, **TRAINED[strategy], **changes}
    return Case(name, settings, stop_at, file=TOKENS)


CASES = [
    *(case(name) for name in TRAINED),
    *(case(f"{name}-clip", train__clip=0.1) for name in ("ddp", "fsdp", "pp")),
    *(case(f"{name}-again", stop_at=2) for name in ("zero1", "fsdp")),
    case("fsdp-bare", stop_at=2, momentum=0.0),
    case("ddp-fp16", train__precision="fp16", extra=False),
    *(case(f"{name}-still", **STILL, train__eval_batch=5) for name in ("ddp", "pp")),
    case("ddp-one-sample", **STILL, held_out=1),
    case("pp-large", train__eval_batch=13),
    *(case(f"{name}-rest", **REST) for name in ("ddp", "fsdp", "tp")),
    *(case(f"ddp-{differs}", differs=differs) for differs in ("order", *DIFFERS)),
]
ON_THREE = [case("ddp"), case("ddp-still", **STILL, train__eval_batch=5)]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched(tmp_path_factory.mktemp("two"), 2, CASES)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched(tmp_path_factory.mktemp("three"), 3, ON_THREE)


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    def run(stop_at: int | None = None, **changes: Any) -> dict[str, Any]:
        name = f"alone-{stop_at}-{len(list(tmp_path.iterdir()))}"
        found = attempted_alone(Case(name, changes, stop_at, file=TOKENS), tmp_path / name)
        assert "error" not in found, found["error"]
        return found

    return run


def close(found: dict[str, Any], expected: dict[str, Any], rel: float = 1e-5) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=rel)
    assert list(found["evaluated"]) == list(expected["evaluated"])
    for step, metrics in expected["evaluated"].items():
        assert found["evaluated"][step] == pytest.approx(metrics, rel=rel, nan_ok=True)


def test_loss_per_token_trains_the_same_in_micro_batches(alone: Any) -> None:
    whole = alone()
    for micro_batch in (6, 4, 1):
        close(alone(train__micro_batch=micro_batch), whole)


def test_step_without_a_token_trains_nothing(alone: Any) -> None:
    found = alone(masked=True, momentum=0.0, train__steps=3)
    assert math.isnan(found["losses"]["2"]) and math.isfinite(found["losses"]["3"])
    alone(masked=True, train__steps=2)


def test_mean_over_a_micro_batchs_tokens_depends_on_the_micro_batch(alone: Any) -> None:
    """Row 2 of issue 18: this is what a Ratio mends."""
    whole, parts = alone(plain=True), alone(plain=True, train__micro_batch=1)
    assert parts["losses"]["4"] != pytest.approx(whole["losses"]["4"], rel=1e-3)
    assert alone()["losses"]["1"] == pytest.approx(whole["losses"]["1"], rel=1e-6)


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_train_like_one(on_two: Path, alone: Any, name: str) -> None:
    close(seen(on_two, name), alone())


def test_three_ranks_train_like_one(on_three: Path, alone: Any) -> None:
    close(seen(on_three, "ddp"), alone())


def test_ranks_may_return_their_metrics_in_another_order(on_two: Path, alone: Any) -> None:
    close(seen(on_two, "ddp-order"), alone())


@pytest.mark.parametrize("differs", DIFFERS)
def test_ranks_with_other_metrics_are_refused(on_two: Path, differs: str) -> None:
    found = seen(on_two, f"ddp-{differs}", fails=True)
    start = "UserError: measure() returned other metrics on rank 1 than on rank 0: "
    assert found["error"].startswith(f"{start}{DIFFERS[differs]}; return the same keys")
    # Training is compared at its first step, an evaluation at its end.
    assert len(found["losses"]) == (2 if differs == "evaluated" else 0)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "pp"])
def test_gradients_are_divided_before_they_are_clipped(on_two: Path, alone: Any, name: str) -> None:
    clipped = alone(train__clip=0.1)
    close(seen(on_two, f"{name}-clip"), clipped)
    assert clipped["losses"] != alone()["losses"]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp"])
def test_smaller_last_batch_is_divided_by_its_own_tokens(
    on_two: Path, alone: Any, name: str
) -> None:
    close(seen(on_two, f"{name}-rest"), alone(**REST))


@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_resumed_training_with_a_ratio(on_two: Path, name: str) -> None:
    assert seen(on_two, f"{name}-again")["losses"] == seen(on_two, name)["losses"]


def test_resumed_training_of_an_optimizer_without_state(on_two: Path, alone: Any) -> None:
    close(seen(on_two, "fsdp-bare"), alone(momentum=0.0))


def test_resumed_training_with_a_ratio_is_bit_for_bit_the_same(alone: Any) -> None:
    straight, again = alone(train__micro_batch=4), alone(stop_at=2, train__micro_batch=4)
    assert again["begun"][1] < 4
    assert (again["losses"], again["evaluated"]) == (straight["losses"], straight["evaluated"])


def test_ratio_with_a_loss_scaler(on_two: Path, alone: Any) -> None:
    """The scale falls as often on one rank as on two, so they skip the same steps."""
    one, two = alone(train__precision="fp16", extra=False), seen(on_two, "ddp-fp16")
    assert two["losses"] == pytest.approx(one["losses"], rel=2e-3)
    assert two["scales"] == one["scales"] * 2


@pytest.mark.parametrize("name", ["ddp", "pp"])
def test_evaluation_is_the_same_to_six_digits_on_two_ranks(
    on_two: Path, alone: Any, name: str
) -> None:
    close(seen(on_two, f"{name}-still"), alone(**STILL), rel=1e-6)


def test_evaluation_is_the_same_to_six_digits_on_three_ranks(on_three: Path, alone: Any) -> None:
    close(seen(on_three, "ddp-still"), alone(**STILL), rel=1e-6)


@pytest.mark.parametrize(
    "sizes",
    [{"train__eval_batch": 1}, {"train__eval_batch": 64}, {"train__micro_batch": 4}],
)
def test_evaluation_does_not_depend_on_its_batches(alone: Any, sizes: dict[str, int]) -> None:
    """Row 2 of issue 18: the area under the curve was 0.83, 0.66 and 0.26."""
    close(alone(**STILL, **sizes), alone(**STILL), rel=1e-6)


def test_pipeline_refuses_larger_batches_in_evaluations(on_two: Path) -> None:
    error = seen(on_two, "pp-large", fails=True)["error"]
    assert "train.eval_batch=13: train.strategy=pp evaluates batches of at most" in error


def test_rank_without_samples_takes_part(on_two: Path, alone: Any) -> None:
    close(seen(on_two, "ddp-one-sample"), alone(**STILL, held_out=1))


def test_evaluation_has_the_values_of_the_whole_set(alone: Any) -> None:
    (found,) = alone(**STILL)["evaluated"].values()
    experiment = two_ranks.layered(TOKENS)
    torch.manual_seed(0)
    values = {name: value[0] / value[1] for name, value in whole(experiment).items()}
    for name in ("loss", "short"):
        assert found[f"val/{name}"] == pytest.approx(float(values[name]), rel=1e-6)
    recalls = values["recall"][values["recall"].isfinite()]
    assert len(recalls) < len(values["recall"]), "padding is no class"
    assert found["val/recall"] == pytest.approx(float(recalls.mean()), rel=1e-6)
    assert found["val/worst"] == float(recalls.min())
    assert found["val/perplexity"] == pytest.approx(float(values["loss"].exp()), rel=1e-6)


def whole(experiment: Any) -> dict[str, Any]:
    """Return the ratios of the whole validation set in one batch, of the first weights."""
    from rankzero.training.build import build

    _, state = build(experiment, World(Ranks(), torch.device("cpu")))
    _, validation = experiment.data()
    with torch.no_grad():
        measured = experiment.measure(state.model.eval(), validation.tensors)
    return {name: measured[name].detach().double() for name in ("loss", "recall", "short")}

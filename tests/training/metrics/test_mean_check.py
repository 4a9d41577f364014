"""Values that are returned as means and are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankzero.ranks import Ranks
from rankzero.training import rng
from rankzero.training.build import build
from rankzero.training.distributed.world import World
from rankzero.training.evaluation import evaluate_goal
from rankzero.training.metrics.mean_check import MeanCheck
from rankzero.training.stop import StopRequest
from support.two_ranks import TOKENS, layered

CPU = torch.device("cpu")
BATCH = torch.linspace(0.1, 3.0, 7)


def noticed(
    measure: Callable[[Any], dict[str, Any]], batch: Any = BATCH, precision: str = "fp32"
) -> list[str]:
    """Return the notices of two evaluations."""
    notices: list[str] = []
    check = MeanCheck(CPU, precision, notices.append)
    before = rng.state(CPU)
    for _ in range(2):
        check.keep(batch, 7, [torch.tensor(1.0)])
        check.run(measure, nn.Identity())
    assert torch.equal(before, rng.state(CPU))
    return notices


def test_perplexity_is_noticed_once_with_both_values() -> None:
    (text,) = noticed(lambda x: {"loss": x.mean(), "perplexity": x.mean().exp()})
    assert "perplexity is 4.7115 for 7 samples, and the mean of their halves " in text
    assert "an Experiment can return a Ratio, or let an object" in text and "loss" not in text


def test_mean_is_not_noticed() -> None:
    assert not noticed(lambda x: {"loss": x.mean(), "accuracy": (x > 1).float().mean()})


@pytest.mark.parametrize(("precision", "count"), [("fp32", 1), ("bf16", 0)])
def test_low_precision_has_a_larger_tolerance(precision: str, count: int) -> None:
    found = noticed(lambda x: {"loss": x.mean() * (1 + 1e-2 / len(x))}, precision=precision)
    assert len(found) == count


def test_value_that_has_no_half_is_noticed() -> None:
    nan = torch.tensor(torch.nan)
    assert noticed(lambda x: {"loss": x.mean() if len(x) == 7 else nan})
    assert not noticed(lambda x: {"loss": nan})


def fails(x: Tensor) -> dict[str, Any]:
    if len(x) < 7:
        raise ValueError("only one class is present")
    return {"loss": x.exp().mean().log()}


@pytest.mark.parametrize(
    ("measure", "batch"),
    [
        (lambda x: {"loss": x.mean().exp() + torch.rand(())}, BATCH),
        (fails, BATCH),
        (lambda batch: {"loss": batch[0].mean().exp()}, [BATCH, torch.ones(3)]),
    ],
    ids=["random", "raises", "other rows"],
)
def test_what_cannot_be_compared_is_left_alone(measure: Any, batch: Any) -> None:
    assert not noticed(measure, batch)


def test_batch_of_one_sample_is_not_kept() -> None:
    notices: list[str] = []
    check = MeanCheck(CPU, "fp32", notices.append)
    check.keep(torch.ones(1), 1)
    check.run(fails, nn.Identity())
    check.keep(BATCH, 7)
    check.run(lambda x: {"loss": x.mean().exp()}, nn.Identity())
    assert len(notices) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_has_no_shape_to_compare() -> None:
    def check(nested: Tensor) -> dict[str, Any]:
        return {"loss": nested.to_padded_tensor(0.0).mean()}

    assert not noticed(check, torch.nested.nested_tensor([torch.ones(2)] * 7))


@pytest.mark.parametrize(
    ("batch", "value", "says"),
    [
        ([torch.ones(5, 2), torch.ones(5)], torch.tensor(1.0), "5 rows for 7 samples"),
        ([torch.ones(5, 2), torch.ones(5)], torch.ones(2), None),
        ([torch.ones(14, 2), torch.ones(14)], torch.tensor(1.0), None),
        ([torch.ones(5, 7), torch.ones(5, 7)], torch.tensor(1.0), None),
        ([torch.ones(5, 2), torch.ones(7)], torch.tensor(1.0), None),
        (["no tensor"], torch.tensor(1.0), None),
        ([torch.ones(9, 2), torch.ones(9)], torch.tensor(1.0), None),
        ([torch.ones(1, 2048)], torch.tensor(1.0), None),
        ([torch.ones(3, 4)] * 7, torch.tensor(1.0), None),
    ],
    ids=[
        "dropped",
        "a Ratio",
        "two views",
        "time first",
        "other tensors",
        "no tensors",
        "padded",
        "packed",
        "a tensor for each sample",
    ],
)
def test_means_over_other_rows_than_the_samples_are_noticed_once(
    batch: Any, value: Tensor, says: str | None
) -> None:
    notices: list[str] = []
    check = MeanCheck(CPU, "fp32", notices.append)
    check.keep(torch.ones(7), 7, [value])  # the first batch drops nothing
    check.run(lambda _: {}, nn.Identity())  # as after each set
    check.keep(batch, 7, [value])
    check.keep(batch, 7, [value])
    assert len(notices) == (says is not None)
    assert all(
        f"collate() returned {says}" in text and "return a Ratio" in text for text in notices
    )


class Remembering(nn.Module):
    """Changes in evaluation, too."""

    seen: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("hidden", torch.zeros(1))
        self.register_buffer("expanded", torch.zeros(1).expand(3))
        self.total, self.calls = torch.zeros(1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.total += x.sum()
        self.hidden, self.last = x.mean(0, keepdim=True), x
        self.calls += 1
        return x * self.calls


def test_model_that_remembers_stays_as_it_is() -> None:
    model = nn.Sequential(Remembering(), nn.ReLU())
    part: Any = model[0]
    check = MeanCheck(CPU, "fp32", [].append)
    with torch.no_grad():
        model(BATCH)
        held = part.seen, part.hidden, part.total, part.last
        values = [one.tolist() for one in held]
        check.keep(BATCH + 1, 7)
        check.run(lambda x: {"loss": model(x).mean()}, model)
    assert [one.tolist() for one in (part.seen, part.hidden, part.total, part.last)] == values
    assert part.calls == 1 and part.seen is held[0] and part.total is held[2]
    assert list(model.state_dict()) == ["0.seen", "0.hidden", "0.expanded"]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:FutureWarning")
def test_model_with_a_scripted_part_is_checked_and_stays_as_it_is() -> None:
    model, notices = nn.Sequential(torch.jit.script(Counting())), list[str]()
    check = MeanCheck(CPU, "fp32", notices.append)
    check.keep(BATCH, 7)
    check.run(lambda x: {"loss": model(x).mean().exp()}, model)
    assert len(notices) == 1 and model[0].calls == 0


@pytest.mark.parametrize("plain", [True, False])
def test_first_evaluation_is_checked(plain: bool) -> None:
    notices: list[str] = []
    experiment = layered(TOKENS, plain=plain, train__eval_batch=3)
    job, state = build(experiment, World(Ranks(), CPU))
    job = dataclasses.replace(job, mean_check=MeanCheck(CPU, "fp32", notices.append))
    metrics = [evaluate_goal(job, state, StopRequest())[0] for _ in range(2)]
    assert metrics[0] == metrics[1]
    assert ["loss is 2.4" in text for text in notices] == [True] * plain

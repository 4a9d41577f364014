"""The objects of torchmetrics as `metrics()`: the same values on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from frameworks.examples import needs
from rankzero.ranks import Ranks
from rankzero.training.distributed.world import World
from support.paths import FIXTURES
from support.two_ranks import Case, attempted, launched, seen

SCORES = FIXTURES / "token_scores.py"
STILL = {"lr": 0.0, "train__steps": 1}
# A pipeline calls the model once in `measure`.
STRATEGIES = ("ddp", "zero1", "fsdp", "tp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs("torchmetrics", "metrics")
    cases = [Case(name, STILL | {"train__strategy": name}, file=SCORES) for name in STRATEGIES]
    cases.append(Case("one", STILL | {"held_out": 1}, file=SCORES))
    return launched(tmp_path_factory.mktemp("two"), 2, cases)


def alone(folder: Path, **changes: Any) -> dict[str, float]:
    found = attempted(
        World(Ranks(), torch.device("cpu")), Case("alone", STILL | changes, file=SCORES), folder
    )
    assert "error" not in found, found["error"]
    (metrics,) = found["evaluated"].values()
    return dict(metrics)


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_have_the_values_of_one(folder: Path, tmp_path: Path, name: str) -> None:
    (metrics,) = seen(folder, name)["evaluated"].values()
    assert metrics == pytest.approx(alone(tmp_path), rel=1e-6)
    assert "val/several/BinaryF1Score" in metrics


@pytest.mark.parametrize("eval_batch", [1, 5])
def test_values_do_not_depend_on_the_batches(folder: Path, tmp_path: Path, eval_batch: int) -> None:
    small = alone(tmp_path / "small", train__eval_batch=eval_batch)
    assert small == pytest.approx(alone(tmp_path / "whole"), rel=1e-6)


def test_rank_without_samples_is_refused(folder: Path) -> None:
    error = seen(folder, "one", fails=True)["error"]
    assert error.startswith("UserError: torchmetrics needs a validation sample on each rank: use")

"""Steps that know where they are, under every strategy on two ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero.run_store import checkpoint_files
from rankzero.training.checkpoints import restore
from support import two_ranks
from support.two_ranks import STAGED, Case, attempted_alone

STRATEGIES = ("ddp", "zero1", "fsdp", "tp", "pp")
FREEZING = ("ddp", "zero1", "fsdp", "tp")
EMA = {"train__ema": 0.5}
FROZEN = {"frozen_parts": "0,2"}
CASES = [
    *(Case(name, {"train__strategy": name}, file=STAGED) for name in STRATEGIES),
    *(
        Case(f"{name}-frozen", {"train__strategy": name, **FROZEN}, file=STAGED)
        for name in STRATEGIES
    ),
    *(
        Case(f"{name}-thawed", {"train__strategy": name, **FROZEN}, stop_at=stop_at, file=STAGED)
        for name, stop_at in (("ddp", 6), ("zero1", 6), ("fsdp", 6), ("tp", 3))
    ),
    Case(
        "fsdp-after-ddp",
        {"train__strategy": "fsdp", **FROZEN},
        3,
        {"train__strategy": "ddp"},
        file=STAGED,
    ),
    *(Case(f"{name}-ema", {"train__strategy": name, **EMA}, file=STAGED) for name in STRATEGIES),
    *(
        Case(f"{name}-ema-again", {"train__strategy": name, **EMA}, stop_at=5, file=STAGED)
        for name in STRATEGIES
    ),
    Case("ddp-static", {"train__ddp__static_graph": True, **FROZEN}, file=STAGED),
    Case("ddp-compiled", {"train__compile": True, **FROZEN}, file=STAGED),
    Case("ddp-by-hand", {"thaws_by_hand": True}, file=STAGED),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all cases in one process group, through the real launcher."""
    return two_ranks.launched(tmp_path_factory.mktemp("staged"), 2, CASES)


# Some cases end with an error, which their tests expect.
seen = functools.partial(two_ranks.seen, fails=True)


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    def run(**changes: Any) -> dict[str, Any]:
        case = Case(f"alone-{len(list(tmp_path.iterdir()))}", changes, file=STAGED)
        return attempted_alone(case, tmp_path / case.name)

    return run


@pytest.mark.parametrize("name", STRATEGIES)
def test_measure_knows_its_place_and_its_helpers(folder: Path, alone: Any, name: str) -> None:
    one, two = alone(), seen(folder, name)
    assert "error" not in two
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4) and len(two["losses"]) == 8
    places = [
        [metrics[f"val/at_{one}"] for one in ("step", "epoch", "total", "training")]
        for metrics in two["evaluated"].values()
    ]
    assert places == [[4, 0, 8, 0], [8, 1, 8, 0]]
    # Six steps make an epoch. The schedule counts epochs.
    rates = [rate for speed in two["speeds"] for rate in speed["lr"]]
    assert rates == pytest.approx([0.01] * 6 + [0.007] * 2)


@pytest.mark.parametrize(
    "name", [*(f"{one}-frozen" for one in FREEZING), "ddp-static", "ddp-compiled"]
)
def test_frozen_parts_are_trained_from_their_epoch_on(folder: Path, alone: Any, name: str) -> None:
    one, two = alone(**FROZEN), seen(folder, name)
    assert "error" not in two and two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert one["losses"]["8"] != pytest.approx(alone()["losses"]["8"], rel=1e-4)


@pytest.mark.parametrize("name", FREEZING)
def test_a_resume_across_the_change_is_bit_identical(folder: Path, name: str) -> None:
    straight, again = seen(folder, f"{name}-frozen"), seen(folder, f"{name}-thawed")
    assert "error" not in again and again["losses"] == straight["losses"]
    assert again["evaluated"] == straight["evaluated"] and len(again["begun"]) == 2


def test_another_strategy_continues_with_frozen_parts(folder: Path, alone: Any) -> None:
    found = seen(folder, "fsdp-after-ddp")
    assert found["losses"] == pytest.approx(alone(**FROZEN)["losses"], rel=1e-4)


def test_a_pipeline_refuses_frozen_parts(folder: Path) -> None:
    assert "UserError: train.strategy=pp cannot freeze" in seen(folder, "pp-frozen")["error"]


def test_parameters_that_are_thawed_by_hand_are_named(folder: Path) -> None:
    error = seen(folder, "ddp-by-hand")["error"]
    assert "'0.weight'.requires_grad was set after model()" in error or "'0.bias'" in error
    assert "write frozen(self, epoch) instead" in error


def saved(folder: Path, name: str) -> dict[str, Any]:
    path, _ = checkpoint_files.newest_intact(folder / name / "checkpoints")
    assert path is not None
    return restore.load(path)


@pytest.mark.parametrize("name", STRATEGIES)
def test_averaged_weights_are_evaluated_and_saved(
    folder: Path, alone: Any, name: str, tmp_path: Path
) -> None:
    one, two = alone(**EMA), seen(folder, f"{name}-ema")
    assert "error" not in two and two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two["losses"] == seen(folder, name)["losses"], "the training uses its own weights"
    for step, metrics in one["evaluated"].items():
        assert two["evaluated"][step] == pytest.approx(metrics, rel=1e-4)
    averages, wanted = saved(folder, f"{name}-ema")["ema"], saved(tmp_path, "alone-0")["ema"]
    assert averages.keys() == wanted.keys()
    for weight, average in averages.items():
        assert torch.allclose(average, wanted[weight], rtol=1e-3, atol=1e-5), weight


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_average_is_bit_identical(folder: Path, name: str) -> None:
    straight, again = seen(folder, f"{name}-ema"), seen(folder, f"{name}-ema-again")
    assert again["losses"] == straight["losses"] and len(again["begun"]) == 2
    assert again["evaluated"] == straight["evaluated"]
    one, two = (saved(folder, f"{name}-ema{kind}")["ema"] for kind in ("", "-again"))
    assert all(torch.equal(one[weight], two[weight]) for weight in one)

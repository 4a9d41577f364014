"""Steps that know where they are, under every strategy on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rankzero.launch import agent
from rankzero.launch.signals import SignalForwarder
from rankzero.ranks import Ranks
from rankzero.training.distributed.world import World
from support import two_ranks
from support.two_ranks import STAGED, Case, attempted

STRATEGIES = ("ddp", "zero1", "fsdp", "tp", "pp")
CASES = [Case(name, {"train__strategy": name}, file=STAGED) for name in STRATEGIES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all cases in one process group, through the real launcher."""
    found = tmp_path_factory.mktemp("staged")
    agent.warm_up()
    with SignalForwarder() as signals:
        request = (str(found), CASES)
        result = agent.run(agent.Topology(2), two_ranks.main, request, found / "logs", signals)
    assert result.status != "FAILED", result
    return found


def seen(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / "seen.json").read_text())
    return found


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    def run(**changes: Any) -> dict[str, Any]:
        case = Case("alone", changes, file=STAGED)
        return attempted(World(Ranks(), torch.device("cpu")), case, tmp_path)

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

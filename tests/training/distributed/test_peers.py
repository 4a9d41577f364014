"""Another rank's failure becomes this rank's, which ends if it waits for its GPU."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rankzero.launch import agent, failures
from rankzero.launch.failures import Failure
from rankzero.launch.signals import SignalForwarder
from rankzero.ranks import Ranks
from rankzero.training.distributed import peers
from rankzero.training.distributed.world import World
from support.two_ranks import hears_of_a_failure

WAITS_SECONDS = 1.0


class Rank0(World):
    """Rank 0 of two, whose store is gone at first, has nothing, and then has a failure."""

    failed = 1

    def failure_reader(self) -> Callable[[], Failure | None]:
        answers = iter([OSError("gone"), None, Failure(1.0, self.failed, "ValueError: ö", "…")])

        def look() -> Failure | None:
            found = next(answers)
            if isinstance(found, OSError):
                raise found
            return found

        return look


class Rank0Itself(Rank0):
    failed = 0


def rank(kind: type[World], device: str, may_end: bool, folder: Path) -> None:
    world = kind(Ranks(0, 2), torch.device(device))
    with peers.watching(world, folder, lambda: may_end, look_seconds=0.02, grace_seconds=0.02):
        time.sleep(WAITS_SECONDS)


@pytest.mark.parametrize(
    ("kind", "device", "may_end", "code"),
    [
        (Rank0, "cuda", True, 1),
        (Rank0, "cuda", False, 0),
        (Rank0, "cpu", True, 0),
        (Rank0Itself, "cuda", True, 0),
    ],
)
def test_a_rank_has_the_reason_of_its_peer_and_does_not_wait_for_a_gpu(
    tmp_path: Path, kind: type[World], device: str, may_end: bool, code: int
) -> None:
    begun = time.time()
    process = multiprocessing.get_context("fork").Process(
        target=rank, args=(kind, device, may_end, tmp_path)
    )
    process.start()
    process.join(60)
    assert process.exitcode == code
    found = failures.first(tmp_path)
    if kind is Rank0Itself:
        assert found is None
        return
    assert found is not None and (found.rank, found.reason) == (1, "ValueError: ö")
    assert [one.name for one in tmp_path.iterdir()] == ["rank_0.json"], "which rank 0 forgets"
    # By the clock of this machine, which the recorder compares with the start of the attempt.
    assert begun <= found.time <= time.time()


def test_a_rank_outside_of_a_collective_hears_of_a_failure(tmp_path: Path) -> None:
    folder = tmp_path / "failures"
    with SignalForwarder() as signals:
        logs = tmp_path / "logs"
        result = agent.run(agent.Topology(2), hears_of_a_failure, str(folder), logs, signals)
    assert result.status == "FINISHED", result
    (written,) = folder.iterdir()
    assert written.name == "rank_0.json"
    assert json.loads(written.read_text())["reason"] == "ValueError: no label (data.py, line 12)"


def test_a_rank_alone_looks_for_nothing(tmp_path: Path) -> None:
    world = World(Ranks(), torch.device("cpu"))
    assert world.failure_reader() is None
    with peers.watching(world, tmp_path, lambda: True, look_seconds=0.0):
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())

"""What happens between two windows of steps."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rankzero.ranks import Ranks
from rankzero.run_store import disk
from rankzero.training.build import build
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.distributed.world import World
from rankzero.training.loop import fit
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.periodic import PeriodicActions
from rankzero.training.stop import StopRequest
from support.checkpoints import GOAL
from support.training import tiny


class SlowDisk:
    """Takes two seconds for the first checkpoint, in which the thread may move bytes."""

    def __init__(self, folder: Path, moves: bool) -> None:
        self._file, self._moves, self._is_slow = folder / "other", moves, True

    def sync(self, path: Path) -> None:
        disk.sync(path)
        for _ in range(20 if self._is_slow else 0):
            time.sleep(0.1)
            if self._moves:
                self._file.write_bytes(b"1")
        self._is_slow = False


@pytest.mark.parametrize(("moves", "least", "most"), [(True, 3, 9), (False, 1, 2)])
def test_rank_beats_while_the_write_before_progresses(
    tmp_path: Path, moves: bool, least: int, most: int
) -> None:
    beats: list[str] = []
    experiment = tiny(train__steps=2, train__checkpoints__save_every=1)
    job, state = build(experiment, World(Ranks(), torch.device("cpu")))
    job = dataclasses.replace(job, beat=lambda waits_for="": beats.append(waits_for))
    checkpoints = Checkpoints(tmp_path, 1, GOAL, sync=SlowDisk(tmp_path, moves).sync)
    fit(job, state, lambda event: None, StopRequest(), checkpoints, RunTotals())
    checkpoints.close()
    assert least <= beats.count("the checkpoint of step 1 to be written") <= most
    assert not beats[-1], "no longer waited for"
    assert 1.5 < checkpoints.blocked_seconds < 10


def test_ranks_that_wait_for_rank_0_beat_with_it() -> None:
    """They only see the sums: whether it writes, and how many bytes its thread has moved."""

    class Rank1(World):
        def sum(self, values: Tensor) -> Tensor:
            return values + torch.tensor(next(answers))

    answers = iter([[1, 5], [1, 9], [1, 9], [1, 9], [0, 9]])
    beats: list[str] = []
    job, state = build(tiny(), Rank1(Ranks(), torch.device("cpu")))
    job = dataclasses.replace(job, beat=lambda waits_for="": beats.append(waits_for))
    actions = PeriodicActions(job, state, lambda event: None, StopRequest(), None, RunTotals())
    actions._await_write()
    assert beats == [""] * 3, "twice for progress, and at the end"

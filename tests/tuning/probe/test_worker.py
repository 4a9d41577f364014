"""Data of a probe: loaded as a training loads them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankzero import config
from rankzero.ranks import Ranks
from rankzero.training import rng
from rankzero.training.build import build
from rankzero.training.data import sets
from rankzero.training.distributed.world import World
from rankzero.tuning.probe import worker
from rankzero.tuning.probe.grid import Cell, ProbeResult
from rankzero.tuning.probe.steady_state import FEWEST
from support.paths import FIXTURES
from support.training import tiny


@pytest.mark.parametrize(("strategy", "size"), [("tp", 8), ("pp", 4)])
def test_a_pipeline_is_measured_with_the_users_own_micro_batch(
    monkeypatch: pytest.MonkeyPatch, strategy: str, size: int
) -> None:
    found = list[int | None]()
    measured = ProbeResult(8, 8, "fp32", "ok")
    monkeypatch.setattr(
        worker, "_measure", lambda one, *_: found.append(one.train.micro_batch) or measured
    )
    experiment = tiny(train__strategy=strategy, train__batch_size=16, train__micro_batch=4)
    world = World(Ranks(), torch.device("cpu"))
    worker._measure_or_fail(experiment, (None, None), world, Cell(8, 8, "fp32"), 1.0, Path())
    assert found == [size]


def test_the_data_are_loaded_under_the_seed_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    monkeypatch.setattr(sets, "load", lambda _: seeds.append(torch.initial_seed()))
    monkeypatch.setattr(config, "from_yaml", lambda *_: tiny(train__seed=7))
    request: Any = SimpleNamespace(
        experiment_file=str(FIXTURES / "tiny.py"), config="", known=(), next_cell=lambda *_: None
    )
    worker._measure_all(request, World(Ranks(), torch.device("cpu")))
    rng.seed_all(7)
    assert seeds == [torch.initial_seed()]


def test_a_window_in_which_the_job_was_suspended_is_measured_again() -> None:
    took = itertools.chain([0.3] * 4, [60.3], itertools.repeat(0.3))
    now, suspended, has_begun = 0.0, 0.0, False

    def clock() -> float:
        nonlocal now, suspended, has_begun
        has_begun = not has_begun
        if not has_begun:
            seconds = next(took)
            now, suspended = now + seconds, suspended + 60.0 * (seconds > 60)
        return now

    job, state = build(tiny(), World(Ranks(), torch.device("cpu"), clock))
    job = dataclasses.replace(job, suspended=lambda: suspended)
    batches = job.train_loader.train_batches(job.batch_order, 0, 0, 1000)
    steady, _, _ = worker._steady_windows(job, state, batches, 4.0)
    assert suspended == 60.0 and steady.windows == pytest.approx([0.3] * FEWEST)

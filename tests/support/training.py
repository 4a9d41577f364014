"""Training in this process, without a launcher or a tracker."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rankzero import config, experiment_file
from rankzero.events import Event, Noticed, StepsLogged
from rankzero.experiment import Experiment
from rankzero.ranks import Ranks
from rankzero.training.build import build
from rankzero.training.checkpoints import restore
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.distributed.world import World
from rankzero.training.job import State, TrainingContext
from rankzero.training.loop import fit
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.stop import StopCode, StopRequest
from support.paths import FIXTURES


@dataclasses.dataclass
class Trained:
    """The results of a training in this process."""

    job: TrainingContext
    state: State
    events: list[Event]
    totals: RunTotals
    stopped: StopCode

    def series(self, name: str) -> dict[int, float]:
        """Return a metric's values by step."""
        logged = [
            event
            for event in self.events
            if isinstance(event, StepsLogged) and name in event.metrics
        ]
        return {
            step: value
            for event in logged
            for step, value in zip(event.steps, event.metrics[name], strict=True)
        }

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


Trainer = Callable[..., Trained]
ALONE = World(Ranks(), torch.device("cpu"))
"""The world of a rank without others."""


def tiny(**changes: Any) -> Experiment:
    """Return the tiny experiment. ``train__steps=3`` means ``train.steps=3``."""
    return config.override(
        experiment_file.load(str(FIXTURES / "tiny.py"))(),
        {key.replace("__", "."): value for key, value in changes.items()},
    )


@pytest.fixture
def group() -> Iterator[None]:
    """Give this process a process group of its own."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def train(tmp_path: Path) -> Trainer:
    """Train an experiment in `folder`, from its newest checkpoint if there is one."""

    def run(
        experiment: Experiment,
        folder: Path = tmp_path,
        stop_at: int | None = None,
        code: StopCode = StopCode.SIGTERM,
        clock: Callable[[], float] = time.perf_counter,
        min_evaluation_seconds: float = 1.0,
    ) -> Trained:
        folder.mkdir(exist_ok=True)
        job, state = build(experiment, World(Ranks(), torch.device("cpu"), clock))
        restore.newest(folder / "checkpoints", job, state, pytest.fail)
        events: list[Event] = []
        totals = RunTotals()
        stop = StopRequest(min_evaluation_seconds=min_evaluation_seconds)

        def notice(text: str) -> None:
            events.append(Noticed(time.time(), text))

        checkpoints = Checkpoints(
            folder, experiment.train.checkpoints.keep, experiment.goal, notice=notice
        )

        def emit(event: Event) -> None:
            events.append(event)
            if (
                stop_at is not None
                and isinstance(event, StepsLogged)
                and event.steps[-1] >= stop_at
            ):
                stop.request(code)

        try:
            stopped = fit(job, state, emit, stop, checkpoints, totals)
        finally:
            events.extend(checkpoints.close())
        return Trained(job, state, events, totals, stopped)

    return run


def weights(trained: Trained) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trained.state.model.parameters()]

"""What each of two ranks does in the tests of strategies: train, stop, go on, all in one process group."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rankzero import config, experiment_file
from rankzero import ranks as launcher
from rankzero.events import Evaluated, Event, StepsLogged
from rankzero.experiment import Experiment
from rankzero.launch.request import JobRequest
from rankzero.training import stop as stopping
from rankzero.training import worker
from rankzero.training.checkpoints import restore
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.distributed.world import World, join
from rankzero.training.loop import fit
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.stop import Stop
from rankzero.training.worker import build
from support.paths import FIXTURES

LAYERED = FIXTURES / "layered.py"


@dataclasses.dataclass(frozen=True)
class Case:
    """An experiment to train, in a folder of its own.

    `stop_at`: a step after which to stop and begin again; `before`: what is otherwise until then.
    """

    name: str
    changes: dict[str, Any]
    stop_at: int | None = None
    before: dict[str, Any] = dataclasses.field(default_factory=dict)
    told: int | None = None
    """The only rank that is told to stop; and a short evaluation is not waited for then. None: all."""


def layered(**changes: Any) -> Experiment:
    """Return the layered experiment; ``train__steps=3`` stands for ``train.steps=3``."""
    found = {key.replace("__", "."): value for key, value in changes.items()}
    return config.override(experiment_file.load(str(LAYERED))(), found)


def main(request: tuple[str, list[Case]]) -> str:
    """Train every case; rank 0 leaves what it saw in ``<folder>/<case>/seen.json``."""
    folder, cases = Path(request[0]), request[1]
    ranks = launcher.detect()
    with join(ranks, torch.device("cpu")) as world:
        for case in cases:
            seen = attempted(world, case, folder / case.name)
            if ranks.first:
                (folder / case.name / "seen.json").write_text(json.dumps(seen))
    return "FINISHED"


def waits(request: JobRequest) -> str:
    """Train; leave word for how many seconds the collectives of each of this rank's process groups wait."""
    ranks = launcher.detect()
    with contextlib.ExitStack() as watched, join(ranks, torch.device("cpu")) as world:
        status = worker.attempt(request, world, Stop(), watched).status
        seconds = [
            group._get_backend(world.device).options._timeout.total_seconds()
            for group in dist.distributed_c10d._world.pg_map
        ]
        (Path(request.runs) / str(ranks.rank)).write_text(json.dumps(seconds))
    return status


def attempted(world: World, case: Case, folder: Path) -> dict[str, Any]:
    """Return what training the case showed: losses and evaluations by step, or why it could not be."""
    folder.mkdir(exist_ok=True)
    seen: dict[str, Any] = {"losses": {}, "trained": [], "evaluated": {}, "begun": [], "ends": []}
    try:
        if case.stop_at is not None:
            stopped = layered(**case.changes | case.before)
            with mock.patch.object(
                stopping, "LEAST_SECONDS", stopping.LEAST_SECONDS if case.told is None else 0.0
            ):
                train(world, stopped, folder, seen, case.stop_at, case.told)
        train(world, layered(**case.changes), folder, seen, None)
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    return seen


def train(
    world: World,
    experiment: Experiment,
    folder: Path,
    seen: dict[str, Any],
    stop_at: int | None,
    told: int | None = None,
) -> None:
    """Train from the newest checkpoint there is; keep what happens in `seen`."""
    job, state = build(experiment, world)
    restore.newest(folder / "checkpoints", job, state, print)
    seen["begun"].append(state.step)
    checkpoints = (
        Checkpoints(folder, experiment.train.checkpoints.keep, experiment.goal)
        if world.ranks.first
        else None
    )
    stop = Stop()

    def emit(event: Event) -> None:
        if isinstance(event, StepsLogged) and "train/loss" in event.metrics:
            seen["trained"] += event.steps
            seen["losses"] |= dict(
                zip(map(str, event.steps), event.metrics["train/loss"], strict=True)
            )
            if (
                stop_at is not None
                and event.steps[-1] >= stop_at
                and told in (None, world.ranks.rank)
            ):
                stop(1)
        if isinstance(event, Evaluated):
            seen["evaluated"][str(event.step)] = dict(event.metrics)

    try:
        tally = RunTotals()
        reason = fit(job, state, emit, stop, checkpoints, tally)
        seen["ends"].append([reason, state.step, state.evaluation_pending])
        seen["straggler"] = tally.rank_times.straggler()
        if job.precision.scaler is not None:
            scale = torch.tensor([job.precision.scaler.get_scale()])
            seen["scales"] = world.gather(scale).flatten().tolist()
    finally:
        if checkpoints is not None:
            checkpoints.close()
    world.all(True)  # nobody reads the folder before it is written

"""The work of each of two ranks in the tests of strategies: train, stop and resume."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankzero import config, experiment_file
from rankzero import ranks as launcher
from rankzero.events import Evaluated, Event, StepsLogged
from rankzero.experiment import Experiment
from rankzero.launch import agent
from rankzero.launch.failures import Failure
from rankzero.launch.request import JobRequest
from rankzero.launch.signals import SignalForwarder
from rankzero.ranks import Ranks
from rankzero.training import final_test, worker
from rankzero.training.build import build
from rankzero.training.checkpoints import restore
from rankzero.training.checkpoints.writer import Checkpoints
from rankzero.training.distributed import device, peers
from rankzero.training.distributed.world import World, join
from rankzero.training.job import State, TrainingContext
from rankzero.training.loop import fit
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.stop import StopCode, StopRequest
from support.paths import FIXTURES

LAYERED, STAGED = FIXTURES / "layered.py", FIXTURES / "staged.py"
TOKENS = FIXTURES / "tokens.py"
HANG_SECONDS = 120
"""A rank that takes so long prints its stacks. A tenth of it is usual."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An experiment to train, in a folder of its own.

    `stop_at`: a step after which to stop and resume. `before`: settings that differ until then.
    """

    name: str
    changes: dict[str, Any]
    stop_at: int | None = None
    before: dict[str, Any] = dataclasses.field(default_factory=dict)
    stopped_rank: int | None = None
    """The only rank that gets the request to stop, which interrupts even a short evaluation."""
    file: Path = LAYERED


def layered(file: Path = LAYERED, **changes: Any) -> Experiment:
    """Return the layered experiment. ``train__steps=3`` means ``train.steps=3``."""
    found = {key.replace("__", "."): value for key, value in changes.items()}
    return config.override(experiment_file.load(str(file))(), found)


def launched(folder: Path, processes: int, cases: list[Case]) -> Path:
    """Train all cases in one process group, through the real launcher. Return the folder."""
    agent.warm_up()
    with SignalForwarder() as signals:
        request, topology = (str(folder), cases), agent.Topology(processes)
        result = agent.run(topology, main, request, folder / "logs", signals)
    if result.status == "FAILED":
        texts = [log.read_text() for log in sorted((folder / "logs").rglob("std*.log"))]
        raise AssertionError("\n".join([str(result), *texts]))
    return folder


def seen(folder: Path, name: str, *, fails: bool = False) -> dict[str, Any]:
    """Return what rank 0 saw of a case."""
    found: dict[str, Any] = json.loads((folder / name / "seen.json").read_text())
    assert fails or "error" not in found, found["error"]
    return found


def main(request: tuple[str, list[Case]]) -> str:
    """Train every case. Rank 0 writes what it saw into ``<folder>/<case>/seen.json``."""
    folder, cases = Path(request[0]), request[1]
    ranks = launcher.detect()
    # No watchdog watches these ranks. Rank 0 ends them, after the others have printed.
    seconds = HANG_SECONDS + 10 * ranks.first
    faulthandler.dump_traceback_later(seconds, exit=ranks.first)
    with join(ranks, lambda _: torch.device("cpu")) as world:
        for case in cases:
            seen = attempted(world, case, folder / case.name)
            if ranks.first:
                (folder / case.name / "seen.json").write_text(json.dumps(seen))
    faulthandler.cancel_dump_traceback_later()
    return "FINISHED"


def hears_of_a_failure(folder: str) -> str:
    """Let rank 1 report a failure, and rank 0 wait, but in no collective, until it has heard."""
    ranks, written = launcher.detect(), Path(folder) / "rank_0.json"
    deadline = time.monotonic() + HANG_SECONDS
    with (
        join(ranks, lambda _: torch.device("cpu")) as world,
        peers.watching(world, Path(folder), lambda: True, look_seconds=0.02),
    ):
        if not ranks.first:
            reason = "ValueError: no label (data.py, line 12)"
            world.report_failure(Failure(time.time(), ranks.rank, reason, "trace"))
        while ranks.first and not written.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    return "FINISHED"


def waits(request: JobRequest) -> str:
    """Train. Write the timeouts, in seconds, of this rank's process groups, and its peak memory.

    Rank 1 takes 200 MB more.
    """
    ranks = launcher.detect()
    kept = torch.ones(50_000_000 * ranks.rank)
    with contextlib.ExitStack() as watched, join(ranks, lambda _: torch.device("cpu")) as world:
        status = worker.attempt(request, world, StopRequest(), watched).status
        seconds = [
            group._get_backend(world.device).options._timeout.total_seconds()
            for group in dist.distributed_c10d._world.pg_map
        ]
        found = seconds, device.peak_memory_megabytes(world), kept.nbytes
        (Path(request.runs) / str(ranks.rank)).write_text(json.dumps(found))
    return status


def attempted(world: World, case: Case, folder: Path) -> dict[str, Any]:
    """Return the losses and evaluations by step, or the error."""
    folder.mkdir(exist_ok=True)
    seen: dict[str, Any] = {
        "losses": {},
        "logged": {},
        "speeds": [],
        "trained": [],
        "evaluated": {},
        "begun": [],
        "ends": [],
        "notices": [],
    }
    try:
        if case.stop_at is not None:
            stopped = layered(case.file, **case.changes | case.before)
            train(world, stopped, folder, seen, case.stop_at, case.stopped_rank)
        train(world, layered(case.file, **case.changes), folder, seen, None)
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    return seen


def attempted_alone(case: Case, folder: Path) -> dict[str, Any]:
    """Return what `attempted` returns in a process without other ranks."""
    return attempted(World(Ranks(), torch.device("cpu")), case, folder)


def tested(
    job: TrainingContext, state: State, checkpoints: Checkpoints | None, folder: Path
) -> Any:
    """Return the step and the metrics of the test sets, if there are any."""
    test_sets = final_test.load_sets(job.experiment, job.world)
    if not test_sets:
        return None
    if checkpoints is not None:
        checkpoints.finish()
    found = final_test.evaluate_best(
        job, state, test_sets, folder / "checkpoints", StopRequest(), print
    )
    return found.step, found.metrics


def train(
    world: World,
    experiment: Experiment,
    folder: Path,
    seen: dict[str, Any],
    stop_at: int | None,
    stopped_rank: int | None = None,
) -> None:
    """Train from the newest checkpoint if there is one. Add what happens to `seen`."""
    job, state = build(experiment, world)
    restore.newest(folder / "checkpoints", job, state, seen["notices"].append)
    seen["begun"].append(state.step)
    checkpoints = (
        Checkpoints(folder, experiment.train.checkpoints.keep, experiment.goal)
        if world.ranks.first
        else None
    )
    stop = StopRequest(min_evaluation_seconds=1.0 if stopped_rank is None else 0.0)

    def emit(event: Event) -> None:
        _record(event, seen)
        if (
            stop_at is not None
            and isinstance(event, StepsLogged)
            and event.steps[-1] >= stop_at
            and stopped_rank in (None, world.ranks.rank)
        ):
            stop.request(StopCode.SIGTERM)

    try:
        totals = RunTotals()
        stopped = fit(job, state, emit, stop, checkpoints, totals)
        seen["ends"].append([stopped.reason or None, state.step, state.evaluation_pending])
        seen |= {
            "tested": None if stopped else tested(job, state, checkpoints, folder),
            "straggler": {k: v for k, v in totals.summary().items() if k.startswith("straggler")},
        }
        if job.precision.scaler is not None:
            scale = torch.tensor([job.precision.scaler.get_scale()])
            seen["scales"] = world.gather(scale).flatten().tolist()
    finally:
        if checkpoints is not None:
            checkpoints.close()
    # No rank may read the folder before rank 0 has written it.
    world.all(True)


def _record(event: Event, seen: dict[str, Any]) -> None:
    if isinstance(event, StepsLogged) and "train/loss" in event.metrics:
        seen["trained"] += event.steps
        for name, column in event.metrics.items():
            seen["logged"].setdefault(name, []).extend(column)
        steps = map(str, event.steps)
        seen["losses"] |= dict(zip(steps, event.metrics["train/loss"], strict=True))
    elif isinstance(event, StepsLogged):
        seen["speeds"].append(dict(event.metrics))
    elif isinstance(event, Evaluated):
        seen["evaluated"][str(event.step)] = dict(event.metrics)

"""What every rank does in a profile: a few steady steps under torch.profiler, and where their time went."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankzero import config, experiment_file
from rankzero.train.spans import Breakdown, Span, breakdown

COMMUNICATION = ("nccl", "gloo:", "c10d::")
WARM_UP, STEPS = 10, 10
TOP = 12
ENDLESS = 1_000_000_000  # steps: an order of samples for ever


@dataclasses.dataclass(frozen=True)
class Request:
    """What to profile, and where the results go."""

    experiment_file: str
    config: str
    folder: str
    failures: str
    trace: bool = True


@dataclasses.dataclass(frozen=True)
class Cost:
    """An operator, by the time that it takes itself."""

    name: str
    milliseconds: float
    """Per step."""
    share: float
    calls: float
    """Per step."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """What rank 0 saw."""

    step_seconds: float
    """Without the profiler, the slowest rank's."""
    profiled_seconds: float
    batch_size: int
    breakdown: Breakdown
    costs: list[Cost]
    device: str


def main(request: Request) -> str:
    """Profile; the entry point of every rank. Rank 0 writes ``profile.json``, every rank its trace."""
    from rankzero.tracking import ranks as launcher
    from rankzero.train import device, failure
    from rankzero.train.world import join

    ranks = launcher.detect()
    try:
        with join(ranks, device.choose(ranks)) as world:
            found = _profile(request, world)
            if ranks.first:
                (Path(request.folder) / "profile.json").write_text(json.dumps(dataclasses.asdict(found), indent=1))
    except BaseException as error:
        failure.write(failure.describe(error, ranks.rank), Path(request.failures))
        raise
    return "FINISHED"


def read(folder: Path) -> Profile:
    """Return what rank 0 left."""
    found = json.loads((folder / "profile.json").read_text())
    costs = [Cost(**cost) for cost in found["costs"]]
    return Profile(**{**found, "breakdown": Breakdown(**found["breakdown"]), "costs": costs})


def _profile(request: Request, world: Any) -> Profile:
    import torch
    from torch.profiler import ProfilerActivity, profile

    from rankzero.train import worker

    experiment = config.from_yaml(experiment_file.load(request.experiment_file), request.config)
    job, state = worker.build(config.override(experiment, {"train.steps": ENDLESS}), world)
    batches = job.train_feed.train(job.plan, job.strategy.shard.rank, 0, ENDLESS)
    state.model.train()
    _steps(job, state, batches, WARM_UP)
    bare, _ = _steps(job, state, batches, STEPS)
    on_gpu = world.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        seconds, waited = _steps(job, state, batches, STEPS)
    slowest = float(world.gather(torch.tensor([bare])).max())
    if request.trace:
        profiler.export_chrome_trace(str(Path(request.folder) / f"trace_rank_{world.ranks.rank}.json.gz"))
    computing, communicating = _spans(profiler.events(), on_gpu)
    return Profile(
        slowest / STEPS, seconds / STEPS, job.plan.batch_size, breakdown(seconds, waited, computing, communicating),
        _costs(profiler.key_averages(), on_gpu), world.device.type,
    )  # fmt: skip


def _steps(job: Any, state: Any, batches: Iterator[Any], count: int) -> tuple[float, float]:
    """Take steps; return the seconds they took, and those that were waited for data."""
    from rankzero.train.loop import train_step

    start, waited = job.world.now(), 0.0
    for _ in range(count):
        _, wait = train_step(job, state, batches)
        waited += wait
    return job.world.now() - start, waited


def _spans(events: Any, on_gpu: bool) -> tuple[list[Span], list[Span]]:
    """Return when something was computed and when something was sent, in seconds.

    On a GPU, by its kernels; on the CPU, by operators of this thread, and what gloo's threads do.
    """
    computing, communicating = [], []
    for event in events:
        span = event.time_range.start / 1e6, event.time_range.end / 1e6
        talks = event.name.lower().startswith(COMMUNICATION)
        if str(event.device_type).endswith("CUDA") != on_gpu:
            continue
        if talks:
            communicating.append(span)
        elif on_gpu or event.name.startswith("aten::"):
            computing.append(span)
    return computing, communicating


def _costs(averages: Any, on_gpu: bool) -> list[Cost]:
    """Return the operators that take the most time, the greatest first."""
    taken = [(event.self_device_time_total if on_gpu else event.self_cpu_time_total, event) for event in averages]
    whole = sum(time for time, _ in taken) or 1.0
    top = sorted(taken, key=lambda pair: -pair[0])[:TOP]
    return [Cost(event.key, time / 1e3 / STEPS, time / whole, event.count / STEPS) for time, event in top if time > 0]

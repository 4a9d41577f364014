"""Profiles a few steady steps with torch.profiler on every rank: where does their time go?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankzero import config, experiment_file
from rankzero.training.profiling.spans import StepBreakdown, breakdown
from rankzero.training.profiling.trace import DATA, FORWARD, attributed, recorded_events

_WARM_UP, _STEPS = 10, 10
_TOP = 12
_ENDLESS = 1_000_000_000
"""Steps of a training that never runs out of batches."""


@dataclasses.dataclass(frozen=True)
class ProfileRequest:
    """The arguments of a profile's ranks."""

    experiment_file: str
    config: str
    folder: str
    failures: str
    trace: bool = True


@dataclasses.dataclass(frozen=True)
class OperatorCost:
    """The time of an operator itself, without the operators that it calls."""

    name: str
    milliseconds: float
    """Per step."""
    share: float
    calls: float
    """Per step."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Rank 0's measurements."""

    step_seconds: float
    """The slowest rank's, without the profiler."""
    profiled_seconds: float
    """Rank 0's seconds per step, with the profiler."""
    batch_size: float
    breakdown: StepBreakdown
    costs: list[OperatorCost]
    device: str


def main(request: ProfileRequest) -> str:
    """Profile: the entry point of every rank. Rank 0 writes ``profile.json``."""
    from rankzero import ranks as launcher
    from rankzero.launch import failures
    from rankzero.training.distributed import device
    from rankzero.training.distributed.world import join

    ranks = launcher.detect()
    try:
        with join(ranks, device.choose) as world:
            found = _profile(request, world)
            if ranks.first:
                text = json.dumps(dataclasses.asdict(found), indent=1)
                (Path(request.folder) / "profile.json").write_text(text, encoding="utf-8")
    except BaseException as error:  # SystemExit, too: the command prints why a rank ended
        failures.write(failures.describe(error, ranks.rank), Path(request.failures))
        raise
    return "FINISHED"


def read(folder: Path) -> Profile:
    """Return the profile that rank 0 wrote."""
    found = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    costs = [OperatorCost(**cost) for cost in found["costs"]]
    return Profile(**{**found, "breakdown": StepBreakdown(**found["breakdown"]), "costs": costs})


def _profile(request: ProfileRequest, world: Any) -> Profile:
    from torch.profiler import ProfilerActivity, profile, record_function

    from rankzero.training.build import build
    from rankzero.training.metrics.straggler import ForwardTimer
    from rankzero.training.step import timed_steps

    experiment = config.from_yaml(experiment_file.load(request.experiment_file), request.config)
    # Neither evaluations nor checkpoints: steps are taken directly.
    train = dataclasses.replace(experiment.train, steps=_ENDLESS)
    job, state = build(dataclasses.replace(experiment, train=train), world)
    # The mark takes the place of the timer, which times some forwards.
    marked = ForwardTimer(world.device, record_function(FORWARD)(job.forward_timer.measure))
    job = dataclasses.replace(job, forward_timer=marked)
    loader, shard = job.train_loader, job.strategy.shard
    batches = _marked(loader.train_batches(job.batch_order, shard.rank, 0, _ENDLESS))
    state.model.train()
    # The first steps compile, and fill the allocator's cache. The profiler makes steps slower, so
    # the speed is measured before.
    timed_steps(job, state, batches, _WARM_UP)
    bare, _ = timed_steps(job, state, batches, _STEPS)
    on_gpu = world.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        seconds, waited = timed_steps(job, state, batches, _STEPS)
    (slowest,) = world.highest(bare)
    if request.trace:
        path = Path(request.folder) / f"trace_rank_{world.ranks.rank}.json.gz"
        profiler.export_chrome_trace(str(path))
    spans = attributed(recorded_events(profiler), on_gpu)
    return Profile(
        slowest / _STEPS,
        seconds / _STEPS,
        job.batch_order.mean_batch_size,
        breakdown(seconds, waited, spans),
        _costs(profiler.key_averages(), on_gpu),
        world.device.type,
    )


def _marked(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches, and mark the time that making each takes."""
    from torch.profiler import record_function

    while True:
        with record_function(DATA):
            batch = next(batches)
        yield batch


def _costs(averages: Any, on_gpu: bool) -> list[OperatorCost]:
    """Return the operators that take the most time, the greatest first."""
    # A kernel's time counts for the operator that launched it, so kernels themselves are left out.
    taken = [
        (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event)
        for event in averages
        if event.device_type.name == "CPU"
    ]
    total = sum(time for time, _ in taken) or 1.0
    return [
        OperatorCost(event.key, time / 1e3 / _STEPS, time / total, event.count / _STEPS)
        for time, event in sorted(taken, key=lambda pair: -pair[0])[:_TOP]
        if time > 0
    ]

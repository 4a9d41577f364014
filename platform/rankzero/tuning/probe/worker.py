"""What every rank does in a probe: one warm process group measures cell after cell. Imports PyTorch when called."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankzero import config, experiment_file
from rankzero.tuning.probe import grid
from rankzero.tuning.probe.grid import Cell, ProbeResult
from rankzero.tuning.probe.steady_state import Steady

if TYPE_CHECKING:
    from rankzero.experiment import Experiment
    from rankzero.training.distributed.world import World
    from rankzero.training.job import State, TrainingContext

Data = tuple[Any, Any]
"""The training and the validation set."""
SHORTEST_SECONDS, PART_OF_A_RUN = 0.5, 0.02
WINDOWS = 10  # in the time that a cell is watched at most
LOCAL_WINDOWS = 4  # without communication, to see what it costs
ENDLESS = 1_000_000_000  # steps: an order of samples for ever


@dataclasses.dataclass(frozen=True)
class ProbeRequest:
    """What to measure."""

    experiment_file: str
    config: str
    batch_sizes: tuple[int, ...]
    precisions: tuple[str, ...]
    known: tuple[ProbeResult, ...]
    results: str
    """A file: a line before each cell and one after it, so that a cell that kills the processes is known."""
    relative: float
    most_seconds: float
    run_samples: float
    """How many samples a whole run trains on: a cell may take a small part of a run's time."""
    failures: str


def main(request: ProbeRequest) -> str:
    """Measure what the ladder asks for; the entry point of every rank."""
    from rankzero import ranks as launcher
    from rankzero.launch import failures as failure
    from rankzero.training.distributed import device
    from rankzero.training.distributed.world import join

    ranks = launcher.detect()
    try:
        with join(ranks, device.choose(ranks)) as world:
            _climb(request, world)
    except BaseException as error:
        failure.write(failure.describe(error, ranks.rank), Path(request.failures))
        raise
    return "FINISHED"


def _climb(request: ProbeRequest, world: World) -> None:
    from rankzero.training import worker

    experiment = config.from_yaml(experiment_file.load(request.experiment_file), request.config)
    measured, data = (
        list(request.known),
        worker.load_data_sets(experiment),
    )  # once: loading may take longer than a cell
    while True:
        cell = grid.next_cell(measured, request.batch_sizes, request.precisions, world.size)
        if cell is None:
            return
        if world.ranks.first:
            _note(request, {"begun": dataclasses.asdict(cell)})
        measured.append(
            _attempt(request, experiment, data, world, cell, cap_seconds(request, measured))
        )
        if world.ranks.first:
            _note(request, dataclasses.asdict(measured[-1]))


def cap_seconds(request: ProbeRequest, measured: Sequence[ProbeResult]) -> float:
    """Return how long a cell may be watched: a fiftieth of a run at the first speed known, within bounds."""
    speeds = [one.samples_per_second for one in measured if one.status == "ok"]
    if not speeds:
        return SHORTEST_SECONDS
    return min(
        request.most_seconds, max(SHORTEST_SECONDS, PART_OF_A_RUN * request.run_samples / speeds[0])
    )


def _attempt(
    request: ProbeRequest,
    experiment: Experiment,
    data: Data,
    world: World,
    cell: Cell,
    most_seconds: float,
) -> ProbeResult:
    """Measure a cell. Alone, a rank survives its own out-of-memory; together, the others would wait for ever."""
    import torch

    began = time.perf_counter()
    try:
        return measure(experiment, data, world, cell, request.relative, most_seconds)
    except torch.OutOfMemoryError as error:
        if world.is_distributed:
            raise
        reason = str(error).splitlines()[0]
    gc.collect()
    torch.cuda.empty_cache()
    return ProbeResult(
        **dataclasses.asdict(cell),
        status="out of memory",
        reason=reason,
        memory_limit_bytes=_limit(world),
        seconds=time.perf_counter() - began,
    )


def measure(
    experiment: Experiment,
    data: Data,
    world: World,
    cell: Cell,
    relative: float,
    most_seconds: float,
) -> ProbeResult:
    """Measure a cell's steady speed with the real data loading. A collective."""
    import torch

    from rankzero.training import worker

    began = time.perf_counter()
    on_gpu = world.device.type == "cuda"
    settings = {
        "train.batch_size": cell.batch_size,
        "train.micro_batch": cell.micro_batch,
        "train.steps": ENDLESS,
        "train.precision": cell.precision,
    }
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    retries = _retries(world)
    job, state = worker.build(config.override(experiment, settings), world, data)
    batches = job.train_loader.train_batches(job.batch_order, job.strategy.shard.rank, 0, ENDLESS)
    state.model.train()
    steady, steps, waits = _windows(job, state, batches, relative, most_seconds)
    seconds = steady.mean / steps
    local = _local_seconds(job, state, batches, steps) if world.is_distributed else seconds
    thrashed = int(world.sum(torch.tensor([_retries(world) - retries], device=world.device)))
    memory = int(
        world.gather(torch.tensor([torch.cuda.max_memory_reserved() if on_gpu else 0])).max()
    )
    del job, state, batches
    gc.collect()
    return ProbeResult(
        **dataclasses.asdict(cell),
        status="out of memory" if thrashed else "ok",
        reason="the allocator had to free its cache to go on" if thrashed else "",
        samples_per_second=cell.batch_size / seconds,
        relative_half_width=steady.relative_half_width,
        step_seconds=seconds,
        data_wait_fraction=waits / seconds,
        communication_fraction=0.0 if local is None else max(0.0, 1 - local / seconds),
        memory_bytes=memory or None,
        memory_limit_bytes=_limit(world),
        seconds=time.perf_counter() - began,
    )


def _windows(
    job: TrainingContext, state: State, batches: Iterator[Any], relative: float, most_seconds: float
) -> tuple[Steady, int, float]:
    """Return the steady windows, the steps in each, and the mean seconds waited for data in a step."""
    steady, steps, waits = Steady(relative, most_seconds), 1, [0.0]
    while not steady.enough:
        seconds, waited = _window(job, state, batches, steps)
        if not steady.warm and seconds < most_seconds / WINDOWS / 2:
            steps *= 2  # longer windows first: one must outlast the noise of a single step
            steady.warm_up.clear()
            continue
        steady.add(seconds)
        waits = [*waits, waited] if steady.windows else [waited]
    return steady, steps, sum(waits) / len(waits) / steps


def _window(
    job: TrainingContext, state: State, batches: Iterator[Any], steps: int
) -> tuple[float, float]:
    """Take some steps; return the slowest rank's seconds and its wait for data. Every rank gets the same."""
    from rankzero.training.loop import train_step
    from rankzero.training.metrics.window import MetricWindow

    window, waited, start = MetricWindow(job.world), 0.0, job.world.now()
    for _ in range(steps):
        metrics, wait = train_step(job, state, batches)
        window.add(metrics)
        waited += wait
    report = window.reduce(0, job.world.now() - start, waited)
    return report.seconds, report.data_wait_seconds


def _local_seconds(
    job: TrainingContext, state: State, batches: Iterator[Any], steps: int
) -> float | None:
    """Return a step's seconds without communication: the same work on the model itself, whose weights drift."""
    strategy = job.strategy.without_communication()
    if strategy is None:
        return None
    alone = dataclasses.replace(job, strategy=strategy)
    times = [_window(alone, state, batches, steps)[0] for _ in range(LOCAL_WINDOWS)]
    return min(times) / steps


def _retries(world: World) -> int:
    import torch

    return (
        int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
        if world.device.type == "cuda"
        else 0
    )


def _limit(world: World) -> int | None:
    import torch

    return int(torch.cuda.mem_get_info()[1]) if world.device.type == "cuda" else None


def _note(request: ProbeRequest, fact: dict[str, Any]) -> None:
    with Path(request.results).open("a", encoding="utf-8") as file:
        file.write(json.dumps(fact) + "\n")

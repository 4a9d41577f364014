"""A rank of a probe: one warm process group measures cell after cell. Imports PyTorch if called."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankzero import config, experiment_file
from rankzero import ranks as launcher
from rankzero.launch import failures
from rankzero.tuning.probe import grid, speed_knobs
from rankzero.tuning.probe.grid import Cell, ProbeResult
from rankzero.tuning.probe.speed_knobs import Subject
from rankzero.tuning.probe.steady_state import SteadyState
from rankzero.tuning.space import dividing

if TYPE_CHECKING:
    from rankzero.experiment import Experiment
    from rankzero.training.distributed.world import World
    from rankzero.training.job import State, TrainingContext

_DataSets = tuple[Any, Any]  # training, validation by group
# A cell's measurement takes a fiftieth of a run, within these bounds.
_PART_OF_A_RUN, _SHORTEST_SECONDS, _MOST_SECONDS = 0.02, 0.5, 4.0
_WINDOWS = 10  # in the most seconds that a cell is measured
_LOCAL_WINDOWS = 4  # without communication, to measure what it costs
_ENDLESS = 1_000_000_000  # steps
_WATCH_MINUTES = 20 / 60  # of a watchdog: it checks every second, so it notices stops of two
_MOST_SUSPENSIONS = 5  # windows of a cell that are left out because the job was suspended


@dataclasses.dataclass(frozen=True)
class ProbeRequest:
    """The cells to measure, and the file of their results. Crosses process boundaries."""

    experiment_file: str
    config: str
    batch_sizes: tuple[int, ...]
    precisions: tuple[str, ...]
    knobs: tuple[str, ...]
    """The knobs of speed to decide at the knee of the map."""
    subject: Subject
    results: Path
    """One line before each cell and one after it. A line without its second is a cell that killed
    its processes."""
    known: tuple[ProbeResult, ...] = ()
    most_seconds: float = math.inf
    """After so long, the ranks begin no cell, once one has a speed."""

    @property
    def failures(self) -> Path:
        """Return the folder of the ranks' failure files."""
        return self.results.with_suffix(".failures")

    @property
    def beat(self) -> Path:
        """Return the file that changes while a cell takes batches."""
        return self.results.with_suffix(".beat")

    def cells(self, measured: Sequence[ProbeResult]) -> list[ProbeResult]:
        """Return the cells of this request's map. Others may be in the same file."""
        wanted = self.batch_sizes, self.precisions
        return [
            one
            for one in measured
            if not one.plan and one.batch_size in wanted[0] and one.precision in wanted[1]
        ]

    def next_cell(self, measured: Sequence[ProbeResult], seconds: float = 0.0) -> Cell | None:
        """Return the next cell, or None if the map is complete, or took too many `seconds`."""
        cells, strategy = self.cells(measured), self.subject.train.strategy
        wanted = self.batch_sizes, self.precisions
        cell = grid.next_cell(cells, *wanted, self.subject.described.processes, strategy)
        knee = grid.knee(cells)
        if knee is None:
            return cell
        if seconds > self.most_seconds:
            return None
        return cell or speed_knobs.replay(self.knobs, self.subject, knee, measured)[0]

    def append(self, fields: dict[str, Any]) -> None:
        """Append a line to the results."""
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def main(request: ProbeRequest) -> str:
    """Measure the cells of a request; the entry point of every rank."""
    from rankzero.training.distributed import device
    from rankzero.training.distributed.world import join
    from rankzero.training.stop import StopRequest, end_with_launcher

    ranks = launcher.detect()
    end_with_launcher(StopRequest())
    try:
        with join(ranks, device.choose) as world:
            _measure_all(request, world)
    except BaseException as error:
        failures.write(failures.describe(error, ranks.rank), request.failures)
        raise
    return "FINISHED"


def _measure_all(request: ProbeRequest, world: World) -> None:
    from rankzero.training import rng
    from rankzero.training.data import sets

    experiment = config.from_yaml(experiment_file.load(request.experiment_file), request.config)
    # As a training does before it loads its data.
    rng.seed_all(experiment.train.seed)
    # Loaded once: that may take longer than a cell.
    began, measured, data = time.monotonic(), list(request.known), sets.load(experiment)
    # Every rank computes the same next cell from the same measurements.
    while cell := request.next_cell(measured, *world.highest(time.monotonic() - began)):
        if world.ranks.first:
            request.append({"begun": dataclasses.asdict(cell)})
        # The first cell's speed shows how long a run takes.
        speed = next((one.samples_per_second for one in measured if one.status == "ok"), math.inf)
        # The effects of knobs are smaller than those of batch sizes.
        shortest = 2 * _SHORTEST_SECONDS if cell.plan else _SHORTEST_SECONDS
        seconds = max(shortest, _PART_OF_A_RUN * request.subject.run_samples / speed)
        seconds = min(_MOST_SECONDS, seconds)
        measured.append(_measure_or_fail(experiment, data, world, cell, seconds, request.beat))
        if world.ranks.first:
            request.append(dataclasses.asdict(measured[-1]))


def _measure_or_fail(
    experiment: Experiment, data: _DataSets, world: World, cell: Cell, limit: float, beat: Path
) -> ProbeResult:
    """Measure a cell; return it as out of memory if a single rank ran out. Collective."""
    import torch

    train, size = experiment.train, cell.micro_batch
    settings = {
        "train.batch_size": cell.batch_size,
        # A pipeline's trials have the user's own.
        "train.micro_batch": dividing(size, train.micro_batch) if train.strategy == "pp" else size,
        "train.steps": _ENDLESS,
        "train.precision": cell.precision,
        **cell.settings,
    }
    experiment = config.override(experiment, settings)
    began = time.perf_counter()
    try:
        return _measure(experiment, data, world, cell, limit, beat)
    except torch.OutOfMemoryError as error:
        # With several ranks, the others would wait for this one without end. So they all end.
        if world.is_distributed:
            raise
        reason = str(error).splitlines()[0]
    finally:
        # The model must be freed before the next cell's is built, and the code compiled for it.
        if experiment.train.compile:
            torch.compiler.reset()
        gc.collect()
    torch.cuda.empty_cache()
    return ProbeResult(
        **dataclasses.asdict(cell),
        status="out of memory",
        reason=reason,
        memory_limit_bytes=_memory_limit(world),
        seconds=time.perf_counter() - began,
    )


def _measure(
    experiment: Experiment, data: _DataSets, world: World, cell: Cell, limit: float, beat: Path
) -> ProbeResult:
    """Measure a cell's steady speed with the real data loading. Collective."""
    import torch

    from rankzero.training.build import build
    from rankzero.training.distributed import device
    from rankzero.training.distributed.watchdog import Watchdog

    began = time.perf_counter()
    device.forget_peak_memory(world)
    retries = _alloc_retries()
    job, state = build(experiment, world, data)
    batches = _batches(job, beat)
    state.model.train()
    _window(job, state, batches, 1)
    (setup_seconds,) = world.highest(time.perf_counter() - began)
    # Nothing beats here, so it ends nothing.
    watchdog = Watchdog(_WATCH_MINUTES, world.ranks.rank, (), setup_seconds=math.inf)
    with watchdog.watching():
        watched = dataclasses.replace(job, suspended=watchdog.suspended_seconds)
        steady, steps, waits = _steady_windows(watched, state, batches, limit)
    seconds = steady.mean / steps
    local = _local_seconds(job, state, batches, steps) if world.is_distributed else None
    # An allocator that freed its cache was slow because the memory was full.
    peak = torch.cuda.max_memory_reserved()
    thrashed, memory = world.highest(_alloc_retries() - retries, peak)
    samples = job.batch_order.mean_batch_size
    return ProbeResult(
        **dataclasses.asdict(cell),
        status="out of memory" if thrashed else "ok",
        reason="the allocator had to free its cache to continue" if thrashed else "",
        samples_per_second=samples / seconds,
        relative_half_width=steady.relative_half_width,
        step_seconds=seconds,
        data_wait_fraction=waits / seconds,
        communication_fraction=0.0 if local is None else max(0.0, 1 - local / seconds),
        memory_bytes=int(memory) or None,
        memory_limit_bytes=_memory_limit(world),
        seconds=world.highest(time.perf_counter() - began)[0],
        setup_seconds=setup_seconds,
    )


def _batches(job: TrainingContext, beat: Path) -> Iterator[Any]:
    """Yield this rank's batches. Rank 0 writes the file meanwhile: a slow step is no hang."""
    rank, last = job.strategy.shard.rank, -math.inf
    for batch in job.train_loader.train_batches(job.batch_order, rank, 0, _ENDLESS):
        if job.world.ranks.first and time.monotonic() - last > 1.0:
            last = time.monotonic()
            with contextlib.suppress(OSError):
                beat.write_text(str(last), encoding="utf-8")
        yield batch


def _steady_windows(
    job: TrainingContext, state: State, batches: Iterator[Any], most_seconds: float
) -> tuple[SteadyState, int, float]:
    """Return the steady windows, the steps in each, and a step's mean seconds waiting for data."""
    steady, steps, waits = SteadyState(most_seconds), 1, [0.0]
    suspensions = 0
    while not steady.enough:
        seconds, waited, suspended = _window(job, state, batches, steps)
        # A process that often holds Python's lock for seconds looks as if it were suspended.
        if suspended and suspensions < _MOST_SUSPENSIONS:
            suspensions += 1
            continue
        # Longer windows first: one must outlast the noise of a single step.
        if not steady.warm and seconds < most_seconds / _WINDOWS / 2:
            steps *= 2
            steady.warm_up.clear()
            continue
        steady.add(seconds)
        waits = [*waits, waited] if steady.windows else [waited]
    return steady, steps, sum(waits) / len(waits) / steps


def _local_seconds(
    job: TrainingContext, state: State, batches: Iterator[Any], steps: int
) -> float | None:
    """Return a step's seconds without communication, or None if the strategy has no such step."""
    from rankzero.training.strategies.replicated import Replicated

    strategy = job.strategy
    # A replica's wrapper communicates, in its backward. Turns have none, and communicate after it.
    if not isinstance(strategy, Replicated) or strategy.replica is strategy.model:
        return None
    # Without communication the ranks' weights drift apart. Nobody uses them after this.
    alone = dataclasses.replace(job, strategy=dataclasses.replace(strategy, replica=strategy.model))
    # The fastest window: a disturbance can only make a step slower.
    return min(_window(alone, state, batches, steps)[0] for _ in range(_LOCAL_WINDOWS)) / steps


def _window(job: TrainingContext, state: State, batches: Iterator[Any], steps: int) -> list[float]:
    """Take some steps; return the slowest rank's seconds, and its wait for data. Collective.

    The third number: for how long a rank was suspended meanwhile, at least.
    """
    from rankzero.training.step import timed_steps

    before = job.suspended()
    taken = timed_steps(job, state, batches, steps)
    return job.world.highest(*taken, job.suspended() - before)


def _alloc_retries() -> int:
    """Return how often the allocator had to free its cache, on a CPU 0: memory was all but full."""
    import torch

    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _memory_limit(world: World) -> int | None:
    import torch

    return int(torch.cuda.mem_get_info()[1]) if world.device.type == "cuda" else None

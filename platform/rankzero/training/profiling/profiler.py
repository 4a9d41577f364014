"""What every rank does in a profile: a few steady steps under torch.profiler, and where their time went."""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero import config, experiment_file
from rankzero.training.profiling.spans import (
    ActivitySpans,
    Span,
    StepBreakdown,
    breakdown,
    common,
    union,
    without,
)

COMMUNICATION = ("nccl", "gloo:", "c10d::")
FORWARD, DATA = "rankzero::forward", "rankzero::data"
BACKWARD, OPTIMIZER = (
    "autograd::engine::evaluate_function",
    "Optimizer.",
)  # as PyTorch marks them itself
MARKS = (
    "rankzero::",
    OPTIMIZER,
    "ProfilerStep",
    "## ",
)  # shown again beside the kernels below them
WARM_UP, STEPS = 10, 10
TOP = 12
RUNTIME = re.compile(
    r"(cuda|cu|hip)[A-Z]"
)  # cudaLaunchKernel, cuLaunchKernel: calls, as CUPTI records them
ENDLESS = 1_000_000_000  # steps: an order of samples for ever


@dataclasses.dataclass(frozen=True)
class ProfileRequest:
    """What to profile, and where the results go."""

    experiment_file: str
    config: str
    folder: str
    failures: str
    trace: bool = True


@dataclasses.dataclass(frozen=True)
class OperatorCost:
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
    breakdown: StepBreakdown
    costs: list[OperatorCost]
    device: str


def main(request: ProfileRequest) -> str:
    """Profile; the entry point of every rank. Rank 0 writes ``profile.json``, every rank its trace."""
    from rankzero import ranks as launcher
    from rankzero.launch import failures as failure
    from rankzero.training.distributed import device
    from rankzero.training.distributed.world import join

    ranks = launcher.detect()
    try:
        with join(ranks, device.choose(ranks)) as world:
            found = _profile(request, world)
            if ranks.first:
                (Path(request.folder) / "profile.json").write_text(
                    json.dumps(dataclasses.asdict(found), indent=1), encoding="utf-8"
                )
    except BaseException as error:
        failure.write(failure.describe(error, ranks.rank), Path(request.failures))
        raise
    return "FINISHED"


def read(folder: Path) -> Profile:
    """Return what rank 0 left."""
    found = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    costs = [OperatorCost(**cost) for cost in found["costs"]]
    return Profile(**{**found, "breakdown": StepBreakdown(**found["breakdown"]), "costs": costs})


def _profile(request: ProfileRequest, world: Any) -> Profile:
    import torch
    from torch.profiler import ProfilerActivity, profile

    from rankzero.training import worker

    experiment = config.from_yaml(experiment_file.load(request.experiment_file), request.config)
    job, state = worker.build(config.override(experiment, {"train.steps": ENDLESS}), world)
    job = dataclasses.replace(job, forward_timer=ForwardMarker())
    batches = marked(
        job.train_loader.train_batches(job.batch_order, job.strategy.shard.rank, 0, ENDLESS)
    )
    state.model.train()
    _steps(job, state, batches, WARM_UP)
    bare, _ = _steps(job, state, batches, STEPS)
    on_gpu = world.device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as profiler:
        seconds, waited = _steps(job, state, batches, STEPS)
    slowest = float(world.gather(torch.tensor([bare])).max())
    if request.trace:
        profiler.export_chrome_trace(
            str(Path(request.folder) / f"trace_rank_{world.ranks.rank}.json.gz")
        )
    recorded = (
        profiler.profiler.kineto_results.events()
    )  # these alone say which operator launched a kernel
    seen = attributed([TraceEvent.of(event) for event in recorded], on_gpu)
    return Profile(
        slowest / STEPS,
        seconds / STEPS,
        job.batch_order.batch_size,
        breakdown(seconds, waited, seen),
        _costs(profiler.key_averages(), on_gpu),
        world.device.type,
    )


def _steps(job: Any, state: Any, batches: Iterator[Any], count: int) -> tuple[float, float]:
    """Take steps; return the seconds they took, and those that were waited for data."""
    from rankzero.training.loop import train_step

    start, waited = job.world.now(), 0.0
    for _ in range(count):
        _, wait = train_step(job, state, batches)
        waited += wait
    return job.world.now() - start, waited


class ForwardMarker:
    """Marks each forward for the profiler, in the place of the forward_timer that times some."""

    def timed(self, measure: Callable[..., Any]) -> Callable[..., Any]:
        from torch.profiler import record_function

        def call(*given: Any) -> Any:
            with record_function(FORWARD):
                return measure(*given)

        return call

    def read(self) -> float:
        return 0.0


def marked(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches, the making of each marked for the profiler."""
    from torch.profiler import record_function

    while True:
        with record_function(DATA):
            batch = next(batches)
        yield batch


@dataclasses.dataclass(frozen=True)
class TraceEvent:
    """What the profiler saw: an operator, a range or a kernel."""

    name: str
    begin: float
    end: float
    on_gpu: bool = False
    number: int = 0
    launched_by: int = 0
    """The number of the operator that launched a kernel; 0 where that is unknown."""
    external_id: int = 0
    """PyTorch's own number of an operator or a range; 0 of what only CUPTI has numbered, such as a call of CUDA's."""

    @classmethod
    def of(cls, event: Any) -> TraceEvent:
        """Return one of the profiler's own events."""
        begin = event.start_ns() / 1e9
        on_gpu = str(event.device_type()).endswith("CUDA")
        end = begin + event.duration_ns() / 1e9
        number, launched_by = event.correlation_id(), event.linked_correlation_id()
        return cls(event.name(), begin, end, on_gpu, number, launched_by, _external_id(event))

    @property
    def is_operator(self) -> bool:
        """Tell whether `number` is PyTorch's. CUDA's calls have CUPTI's, and the two overlap."""
        return not self.on_gpu and self.external_id != 0 and self.launched_by == 0

    @property
    def span(self) -> Span:
        return self.begin, self.end

    @property
    def talks(self) -> bool:
        return self.name.lower().startswith(COMMUNICATION)


def _external_id(event: Any) -> int:
    """Return the event's number in PyTorch; as far as its name tells, where PyTorch does not say."""
    if hasattr(event, "external_id"):
        return int(event.external_id())
    return 0 if RUNTIME.match(event.name()) else int(event.correlation_id())


def attributed(events: Sequence[TraceEvent], on_gpu: bool) -> ActivitySpans:
    """Return when something was computed, by what for, and when something was sent.

    On a GPU, by its kernels: a kernel belongs to the range in which the operator that launched it began. On the CPU, by
    operators of this thread, and what gloo's threads do. The forward is what `measure` does; where that computes
    nothing, as on a pipeline's stages, it is what is neither the backward nor the optimizer.
    """
    host = [event for event in events if not event.on_gpu]
    ranges = {
        prefix: union(event.span for event in host if event.name.startswith(prefix))
        for prefix in (FORWARD, BACKWARD, OPTIMIZER, DATA)
    }
    mine = [event for event in events if event.on_gpu] if on_gpu else host
    talking = [event.span for event in mine if event.talks]
    work = [event for event in mine if not event.talks]
    if on_gpu:
        kernels = [event for event in work if not event.name.startswith(MARKS)]
        parts = _by_launch(
            kernels, {event.number: event.begin for event in host if event.is_operator}, ranges
        )
    else:
        parts = _by_time(
            union(event.span for event in work if event.name.startswith("aten::")), ranges
        )
    if not parts[FORWARD]:
        parts = {**parts, FORWARD: parts[""], "": []}
    return ActivitySpans(parts[FORWARD], parts[BACKWARD], parts[OPTIMIZER], parts[""], talking)


def _by_time(busy: Sequence[Span], ranges: Mapping[str, Sequence[Span]]) -> dict[str, list[Span]]:
    """Cut the time in which something was computed up by the ranges; what is in none is under the empty name."""
    rest, parts = without(busy, ranges[DATA]), {}  # making a batch is waiting for it
    for name in (OPTIMIZER, BACKWARD, FORWARD):
        parts[name] = common(rest, ranges[name])
        rest = without(rest, ranges[name])
    return {**parts, "": rest}


def _by_launch(
    kernels: Sequence[TraceEvent], begun: Mapping[int, float], ranges: Mapping[str, Sequence[Span]]
) -> dict[str, list[Span]]:
    """Sort kernels by the range in which they were launched; those of no known range go under the empty name."""
    parts: dict[str, list[Span]] = {name: [] for name in (OPTIMIZER, BACKWARD, FORWARD, DATA, "")}
    for kernel in kernels:
        at = begun.get(kernel.launched_by) if kernel.launched_by else None
        parts[_range_at(at, ranges)].append(kernel.span)
    return parts


def _range_at(moment: float | None, ranges: Mapping[str, Sequence[Span]]) -> str:
    for name in (OPTIMIZER, BACKWARD, FORWARD, DATA):
        place = 0 if moment is None else bisect.bisect_right(ranges[name], (moment, math.inf))
        if moment is not None and place and moment < ranges[name][place - 1][1]:
            return name
    return ""


def _costs(averages: Any, on_gpu: bool) -> list[OperatorCost]:
    """Return the operators that take the most time, the greatest first; a kernel's time counts with who launched it."""
    from torch._C._autograd import DeviceType

    operators = [event for event in averages if event.device_type == DeviceType.CPU]
    taken = [
        (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event)
        for event in operators
    ]
    whole = sum(time for time, _ in taken) or 1.0
    top = sorted(taken, key=lambda pair: -pair[0])[:TOP]
    return [
        OperatorCost(event.key, time / 1e3 / STEPS, time / whole, event.count / STEPS)
        for time, event in top
        if time > 0
    ]

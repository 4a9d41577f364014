"""What is compared, and what is made of it: arithmetic on measured runs. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from rankzero.errors import UserError
from rankzero.events import Event, SystemSampled
from rankzero.training.profiling.spans import StepBreakdown

STRATEGIES = ("single", "dp", "ddp", "zero1", "fsdp", "tp", "pp")
DATA_BOUND = 0.1


@dataclasses.dataclass(frozen=True)
class StrategyRun:
    """One way of training the same work."""

    strategy: str
    devices: int

    @property
    def processes(self) -> int:
        return 1 if self.strategy in ("single", "dp") else self.devices

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.devices}"


@dataclasses.dataclass(frozen=True)
class StrategyResult:
    """What training showed; None: not measured here."""

    entry: StrategyRun
    seconds: float = 0.0
    """Of training, without evaluations."""
    samples_per_second: float = 0.0
    half_width: float | None = None
    memory_megabytes: float | None = None
    gpu_percent: float | None = None
    samples_per_joule: float | None = None
    breakdown: StepBreakdown | None = None
    reason: str = ""
    """Why it could not be measured; empty where it was."""


@dataclasses.dataclass(frozen=True)
class StrategyRow:
    """A measured entry beside the first one."""

    measured: StrategyResult
    speed_up: float | None
    efficiency: float | None
    """The speed-up for each device: 1 is ideal."""


def entries(strategies: Sequence[str], devices: Sequence[int]) -> list[StrategyRun]:
    """Return what to compare: one device once, by `single` or the first strategy; then all others on several.

    Raises UserError for a name or a number that there is not.
    """
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown:
        raise UserError(f"no strategy is called {unknown[0]!r}: choose of {', '.join(STRATEGIES)}")
    if not strategies or not devices or min(devices) < 1:
        raise UserError("compare needs at least one strategy, and numbers of devices of at least 1")
    first = "single" if "single" in strategies else strategies[0]
    found = [StrategyRun(first, 1)] if 1 in devices else []
    for count in sorted(set(devices) - {1}):
        found += [
            StrategyRun(name, count) for name in dict.fromkeys(strategies) if name != "single"
        ]
    if not found:
        raise UserError("single is one device: add 1 to --nproc, or another strategy")
    return found


def rows(measured: Sequence[StrategyResult]) -> list[StrategyRow]:
    """Return each entry's speed-up over the first that was measured, per device of that."""
    base = next((one for one in measured if not one.reason), None)
    found = []
    for one in measured:
        if one.reason or base is None:
            found.append(StrategyRow(one, None, None))
            continue
        speed_up = one.samples_per_second / base.samples_per_second
        found.append(StrategyRow(one, speed_up, speed_up * base.entry.devices / one.entry.devices))
    return found


def warnings(measured: Sequence[StrategyResult], on_cpu: bool, threads_fixed: bool) -> list[str]:
    """Return why a comparison would not be fair."""
    found = []
    slow = [
        one.entry.name
        for one in measured
        if one.breakdown is not None and one.breakdown.data > DATA_BOUND
    ]
    if slow:
        found.append(
            f"{', '.join(slow)}: waiting for data; what is compared is the loading (raise train.workers)"
        )
    if on_cpu and not threads_fixed and len({one.entry.processes for one in measured}) > 1:
        found.append(
            "one process computes on all cores: set OMP_NUM_THREADS=1 to compare one core with several"
        )
    unsure = [one.entry.name for one in measured if not one.reason and one.half_width is None]
    if unsure:
        found.append(
            f"{', '.join(unsure)}: too short for an interval; train longer (train.steps=…)"
        )
    return found


def mean_of(events: Iterable[Event], stem: str) -> float | None:
    """Return the mean over time and GPUs of a sampled metric, ``utilization_percentage`` for instance."""
    values = [
        value
        for event in events
        if isinstance(event, SystemSampled)
        for name, value in event.metrics.items()
        if "gpu" in name and name.endswith(stem)
    ]
    return statistics.fmean(values) if values else None

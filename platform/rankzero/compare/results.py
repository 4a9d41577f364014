"""Strategies to compare, their measurements, and what follows from these. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rankzero.errors import UserError
from rankzero.training.profiling.spans import StepBreakdown

_STRATEGIES = ("single", "dp", "ddp", "zero1", "fsdp", "tp", "pp")
_DATA_BOUND = 0.1  # of a step's time


@dataclasses.dataclass(frozen=True)
class StrategyRun:
    """A strategy on a number of devices."""

    strategy: str
    devices: int

    @property
    def processes(self) -> int:
        """Return the number of its processes."""
        return 1 if self.strategy in ("single", "dp") else self.devices

    @property
    def name(self) -> str:
        """Return its name: ``ddp-2``."""
        return f"{self.strategy}-{self.devices}"


@dataclasses.dataclass(frozen=True)
class StrategyResult:
    """The measurement of one training, a row of the table; None: not measured here."""

    run: StrategyRun
    seconds: float = 0.0
    """The training's time, without evaluations."""
    samples_per_second: float = 0.0
    half_width: float | None = None
    memory_megabytes: float | None = None
    gpu_percent: float | None = None
    samples_per_joule: float | None = None
    breakdown: StepBreakdown | None = None
    reason: str = ""
    """Why it could not be measured, else empty."""
    speed_up: float | None = None
    """Over the first measurement."""
    efficiency: float | None = None
    """The speed-up for each device: 1 is ideal."""


def strategy_runs(
    strategies: Sequence[str], devices: Sequence[int], *, typed: bool = True
) -> list[StrategyRun]:
    """Return the runs to compare: one on one device, then each strategy on several devices.

    The first is of `single` if that is among the strategies. `typed`: the user chose the
    strategies. Raises UserError for an unknown name or an invalid number, and for a typed `single`
    without one device.
    """
    strategies = [name.strip() for name in strategies]
    unknown = [name for name in strategies if name not in _STRATEGIES]
    if unknown:
        raise UserError(f"no strategy is called {unknown[0]!r}: choose of {', '.join(_STRATEGIES)}")
    if not strategies or not devices or min(devices) < 1:
        raise UserError("compare needs at least one strategy, and numbers of devices of at least 1")
    first = "single" if "single" in strategies else strategies[0]
    # On one device all strategies but the first would be the same training.
    found = [StrategyRun(first, 1)] if 1 in devices else []
    # `single` has no meaning on several devices.
    several = [name for name in dict.fromkeys(strategies) if name != "single"]
    for count in sorted(set(devices) - {1}):
        found += [StrategyRun(name, count) for name in several]
    if typed and "single" in strategies and 1 not in devices:
        raise UserError("single is one device: add 1 to --nproc, or choose other strategies")
    return found


def with_speed_ups(results: Sequence[StrategyResult]) -> list[StrategyResult]:
    """Return the measurements with their speed-ups over the first one."""
    # A strategy that failed cannot be the base.
    base = next((one for one in results if not one.reason), None)
    found = []
    for one in results:
        if base is not None and not one.reason:
            speed_up = one.samples_per_second / base.samples_per_second
            efficiency = speed_up * base.run.devices / one.run.devices
            one = dataclasses.replace(one, speed_up=speed_up, efficiency=efficiency)
        found.append(one)
    return found


def warnings(results: Sequence[StrategyResult], on_cpu: bool, threads_fixed: bool) -> list[str]:
    """Return why the comparison would not be fair."""
    found = []
    slow = [one for one in results if one.breakdown and one.breakdown.data > _DATA_BOUND]
    if slow:
        why = "waiting for data, so this compares the loading"
        found.append(f"{_names(slow)}: {why}: raise train.workers")
    # PyTorch takes all cores for one process and shares them among several.
    if on_cpu and not threads_fixed and len({one.run.processes for one in results}) > 1:
        fix = "set OMP_NUM_THREADS=1 to compare one core with several"
        found.append(f"one process computes on all cores: {fix}")
    unsure = [one for one in results if not one.reason and one.half_width is None]
    if unsure:
        found.append(f"{_names(unsure)}: too short for an interval: train longer (train.steps=…)")
    return found


def _names(results: Sequence[StrategyResult]) -> str:
    return ", ".join(one.run.name for one in results)

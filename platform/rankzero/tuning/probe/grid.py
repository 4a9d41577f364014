"""The grid of batch size x precision: which cell to measure next, and what the cells show. Pure.

Each precision starts at the smallest batch size and goes up, until a larger batch gains no more
than the noise, or does not fit. Reserved memory is a linear function of the micro-batch, so two
cells predict what fits. If one rank's share of a batch does not fit, the largest micro-batch that
does is tried with accumulation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rankzero import ranks
from rankzero.tuning.space import row_name

Status = Literal["ok", "out of memory", "refused", "failed"]
HEADROOM = 0.92
"""The share of the device's memory that may be filled. Fragmentation takes some of the rest."""
_GAIN = 0.05  # a larger batch must be this much faster, or the next one is not tried
_DATA_BOUND, _COMMUNICATION_BOUND = 0.1, 0.25  # of a step's time


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell to measure: `batch_size` is over all ranks and micro-batches."""

    batch_size: int
    micro_batch: int
    precision: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of speed that differ from the user's own."""
    plan: str = ""
    """The measurement of knobs that the cell belongs to; empty: the map."""


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """The measurement of one cell."""

    batch_size: int
    micro_batch: int
    precision: str
    status: Status
    samples_per_second: float = 0.0
    relative_half_width: float = math.inf
    """Half the 95 % interval over the mean."""
    step_seconds: float = 0.0
    data_wait_fraction: float = 0.0
    communication_fraction: float = 0.0
    memory_bytes: int | None = None
    """Reserved on the worst rank; None if the device does not report it."""
    memory_limit_bytes: int | None = None
    seconds: float = 0.0
    """The time of the measurement itself."""
    reason: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plan: str = ""
    setup_seconds: float = 0.0
    """The time to build everything and take the first step, which compiles."""
    devices: int = 1

    @property
    def bound(self) -> str:
        """Return what limits the speed: data, communication or compute."""
        data, communication = self.data_wait_fraction, self.communication_fraction
        if data > _DATA_BOUND and data >= communication:
            return "data"
        return "communication" if communication > _COMMUNICATION_BOUND else "compute"


def parse(fields: Mapping[str, Any]) -> ProbeResult:
    """Return the measurement that `dataclasses.asdict` made a mapping of. Ignore unknown fields."""
    known = {field.name for field in dataclasses.fields(ProbeResult)}
    return ProbeResult(**{name: value for name, value in fields.items() if name in known})


def is_lasting(one: ProbeResult) -> bool:
    """Return whether a measurement holds for later commands, too: a failure may have been mended.

    A lack of memory is one only of a device with a known limit.
    """
    return one.status == "ok" or (one.status == "out of memory" and bool(one.memory_limit_bytes))


def next_cell(
    measured: Sequence[ProbeResult],
    batch_sizes: Sequence[int],
    precisions: Sequence[str],
    world_size: int,
    strategy: str = "ddp",
) -> Cell | None:
    """Return the next cell that is worth measuring, or None if the map is complete."""
    shards = ranks.shards(strategy, world_size)
    for precision in precisions:
        found = [one for one in measured if one.precision == precision]
        cell = _next_of_precision(found, batch_sizes, precision, shards)
        # A pipeline divides all of its batch, and does not accumulate.
        if cell and (strategy != "pp" or cell.micro_batch == cell.batch_size):
            return cell
    return None


def _next_of_precision(
    found: Sequence[ProbeResult], batch_sizes: Sequence[int], precision: str, shards: int
) -> Cell | None:
    # A cell that crashed would be followed by larger ones that crash as well.
    if found and found[-1].status == "failed":
        return None
    good = sorted((one for one in found if one.status == "ok"), key=lambda one: one.batch_size)
    if len(good) >= 2:
        before, after = good[-2:]
        ratio = after.samples_per_second / before.samples_per_second
        noise = math.hypot(before.relative_half_width, after.relative_half_width)
        # Continue if the larger batch may be faster, as far as the intervals show.
        if ratio * (1 + noise) <= 1 + _GAIN:
            return None
    largest = max((one.batch_size for one in found), default=0)
    batch_size = min((size for size in batch_sizes if size > largest), default=0)
    # With a smaller micro-batch than its share, a rank accumulates.
    share, fits = batch_size // shards, _largest_fitting(found)
    divisors = (size for size in range(1, share + 1) if share % size == 0)
    micro_batch = max((size for size in divisors if size <= fits), default=0)
    return Cell(batch_size, micro_batch, precision) if micro_batch else None


def _largest_fitting(found: Sequence[ProbeResult]) -> float:
    """Return the largest micro-batch of a precision that fits; infinite while nothing is known.

    A cell that ran out of memory limits it as well, so a precision runs out of memory at most once.
    """
    failed = [one.micro_batch for one in found if one.status == "out of memory"]
    bound = min(failed) / 2 if failed else math.inf
    limits = [one.memory_limit_bytes for one in found if one.memory_limit_bytes]
    by_micro = {
        one.micro_batch: one.memory_bytes
        for one in found
        if one.status == "ok" and one.memory_bytes
    }
    if len(by_micro) < 2 or not limits:
        return bound
    # The line through the two largest micro-batches.
    (low, low_bytes), (high, high_bytes) = sorted(by_micro.items())[-2:]
    bytes_per_sample = (high_bytes - low_bytes) / (high - low)
    if bytes_per_sample <= 0:
        return bound
    fixed_bytes = low_bytes - bytes_per_sample * low
    return min(bound, (HEADROOM * min(limits) - fixed_bytes) / bytes_per_sample)


def row_names(measured: Sequence[ProbeResult]) -> list[str]:
    """Return each cell's row of the map: ``bf16``, or ``4 x bf16`` with several device counts."""
    several = len({one.devices for one in measured}) > 1
    return [row_name(one.devices, one.precision) if several else one.precision for one in measured]


def fastest(measured: Sequence[ProbeResult]) -> dict[int, ProbeResult]:
    """Return the cell with the most samples/s of every batch size, the smallest size first."""
    able = (one for one in measured if one.status == "ok")
    # A later cell replaces an earlier one of its batch size, so the fastest stays.
    best = {one.batch_size: one for one in sorted(able, key=lambda one: one.samples_per_second)}
    return dict(sorted(best.items()))


def knee(measured: Sequence[ProbeResult]) -> ProbeResult | None:
    """Return the smallest batch within 5 % of the highest speed, or None without a measurement."""
    frontier = fastest(measured).values()
    peak = max((one.samples_per_second for one in frontier), default=0.0)
    return next((one for one in frontier if one.samples_per_second >= (1 - _GAIN) * peak), None)


def worth_searching(measured: Sequence[ProbeResult], precisions: Sequence[str]) -> list[str]:
    """Return the precisions that come within 10 % of the fastest at some batch size."""
    best = fastest(measured)
    near = {
        one.precision
        for one in measured
        if one.status == "ok"
        and one.samples_per_second >= 0.9 * best[one.batch_size].samples_per_second
    }
    return [name for name in precisions if name in near]

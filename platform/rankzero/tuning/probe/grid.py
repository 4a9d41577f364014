"""Which cell of batch size x precision to measure next, and what the measured ones say. Pure.

A precision's ladder goes up the batch sizes, until a larger batch gains nothing that the noise does not cover, or does
not fit. What fits is predicted: reserved memory is a line in the micro-batch, known from two cells. Where one rank's
share does not fit, the largest micro-batch that does is tried with accumulation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Status = Literal["ok", "out of memory", "failed"]
HEADROOM = 0.92  # of the device's memory: the rest is fragmentation's, and other people's
GAIN = 0.05  # a larger batch must be this much faster for the ladder to go on
DATA_BOUND, COMMUNICATION_BOUND = 0.1, 0.25  # of a step's time


@dataclasses.dataclass(frozen=True)
class Cell:
    """What to measure: `batch_size` over all ranks and micro-batches."""

    batch_size: int
    micro_batch: int
    precision: str


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """What one cell gave."""

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
    """Reserved on the worst rank; None where the device does not say."""
    memory_limit_bytes: int | None = None
    seconds: float = 0.0
    """What the measurement took."""
    reason: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.batch_size, self.micro_batch, self.precision)

    @property
    def bound(self) -> str:
        """Return what limits the speed, as measured: data, communication or compute."""
        if (
            self.data_wait_fraction > DATA_BOUND
            and self.data_wait_fraction >= self.communication_fraction
        ):
            return "data"
        return "communication" if self.communication_fraction > COMMUNICATION_BOUND else "compute"


def parse(fields: Mapping[str, Any]) -> ProbeResult:
    """Return what `dataclasses.asdict` made of a measurement; fields that are not known are left out."""
    known = {field.name for field in dataclasses.fields(ProbeResult)}
    return ProbeResult(**{name: value for name, value in fields.items() if name in known})


def next_cell(
    measured: Sequence[ProbeResult],
    batch_sizes: Sequence[int],
    precisions: Sequence[str],
    world_size: int,
) -> Cell | None:
    """Return the next cell worth measuring; None when the map is done."""
    for precision in precisions:
        found = [one for one in measured if one.precision == precision]
        cell = _next_of(found, batch_sizes, precision, world_size)
        if cell is not None:
            return cell
    return None


def _next_of(
    found: Sequence[ProbeResult], batch_sizes: Sequence[int], precision: str, world_size: int
) -> Cell | None:
    done = {one.batch_size for one in found}
    good = sorted((one for one in found if one.status == "ok"), key=lambda one: one.batch_size)
    if found and found[-1].status == "failed":
        return None
    if len(good) >= 2 and not _gains(good[-2], good[-1]):
        return None
    left = [size for size in batch_sizes if size not in done and (not done or size > max(done))]
    if not left:
        return None
    share = left[0] // world_size
    fits = largest_fitting(found, precision)
    if share <= fits:
        return Cell(left[0], share, precision)
    micro = max((size for size in _divisors(share) if size <= fits), default=0)
    return Cell(left[0], micro, precision) if micro else None


def _gains(before: ProbeResult, after: ProbeResult) -> bool:
    """Tell whether the larger batch may still be faster by more than `GAIN`, as far as the intervals can tell."""
    ratio = after.samples_per_second / before.samples_per_second
    noise = math.hypot(before.relative_half_width, after.relative_half_width)
    return ratio * (1 + noise) > 1 + GAIN


def largest_fitting(found: Sequence[ProbeResult], precision: str) -> float:
    """Return the largest micro-batch that fits, by the line through two cells; infinite while nothing is known.

    A cell that ran out of memory bounds it as well: one deliberate failure for a precision is the most there is.
    """
    failed = [
        one.micro_batch
        for one in found
        if one.precision == precision and one.status == "out of memory"
    ]
    bound = min(failed) / 2 if failed else math.inf
    line = memory_line([one for one in found if one.precision == precision])
    limits = [one.memory_limit_bytes for one in found if one.memory_limit_bytes]
    if line is None or not limits or line[1] <= 0:
        return bound
    return min(bound, (HEADROOM * min(limits) - line[0]) / line[1])


def memory_line(found: Sequence[ProbeResult]) -> tuple[float, float] | None:
    """Return (bytes at zero, bytes a sample of the micro-batch) through the two largest measured micro-batches."""
    by_micro = {
        one.micro_batch: one.memory_bytes
        for one in found
        if one.status == "ok" and one.memory_bytes
    }
    if len(by_micro) < 2:
        return None
    (low, low_bytes), (high, high_bytes) = sorted(by_micro.items())[-2:]
    slope = (high_bytes - low_bytes) / (high - low)
    return low_bytes - slope * low, slope


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def fastest(measured: Sequence[ProbeResult]) -> list[ProbeResult]:
    """Return, of every batch size, the cell with the most samples/s: the frontier."""
    best: dict[int, ProbeResult] = {}
    for one in measured:
        if one.status == "ok" and one.samples_per_second > _speed(best.get(one.batch_size)):
            best[one.batch_size] = one
    return [best[size] for size in sorted(best)]


def knee(measured: Sequence[ProbeResult]) -> ProbeResult | None:
    """Return the smallest batch within 5 % of the highest speed."""
    frontier = fastest(measured)
    peak = max(map(_speed, frontier), default=0.0)
    return next((one for one in frontier if one.samples_per_second >= (1 - GAIN) * peak), None)


def worth_searching(measured: Sequence[ProbeResult], precisions: Sequence[str]) -> list[str]:
    """Return the precisions that come within a tenth of the fastest at some batch size."""
    peaks = {one.batch_size: one.samples_per_second for one in fastest(measured)}
    near = {
        one.precision
        for one in measured
        if one.status == "ok" and one.samples_per_second >= 0.9 * peaks[one.batch_size]
    }
    return [name for name in precisions if name in near]


def hardware_batch(measured: Sequence[ProbeResult]) -> float | None:
    """Return the batch that gives half the peak speed, by a least-squares line through the step times T = a + b B."""
    found = fastest(measured)
    if len(found) < 2:
        return None
    xs, ys = [one.batch_size for one in found], [one.step_seconds for one in found]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum(
        (x - mean_x) ** 2 for x in xs
    )
    intercept = mean_y - slope * mean_x
    return max(0.0, intercept) / slope if slope > 0 else None


def _speed(one: ProbeResult | None) -> float:
    return 0.0 if one is None else one.samples_per_second

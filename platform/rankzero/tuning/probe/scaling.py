"""The scaling curve: what more devices do for the speed, and how many pay. Pure.

The probe measures the same batch on each number of devices n. The seconds of a step follow

    t(n) = a / n + b + c n

with the work that is divided, the work that is not, and what each device adds, such as the
latencies of a ring (the Universal Scalability Law, Gunther 2007; without c, Amdahl's law of 1967).

One more device pays while n t(n)^2 falls: until then, 1 % more devices bring at least half a per
cent more speed (Eager, Zahorjan and Lazowska 1989).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence

from rankzero.scalars import shown
from rankzero.tuning.probe import grid
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.space import devices_text

SCALING_COLUMNS = ("devices", "samples/s", "speed-up", "efficiency", "communication", "source")
_FARTHEST = 64  # times the most devices: no prediction beyond
_SURE = 0.2  # relative: a measurement with a wider interval is no base for a curve


@dataclasses.dataclass(frozen=True)
class ScalingPoint:
    """The speed of one batch on some devices, measured or predicted."""

    devices: int
    samples_per_second: float
    speed_up: float
    """Over the fewest devices."""
    efficiency: float
    """The speed-up over that of the number of devices."""
    half_width: float = 0.0
    """Half the 95 % interval of the speed-up, relative to it."""
    communication: float = 0.0
    """The share of a step; 0: none, or unknown."""
    is_predicted: bool = False

    @property
    def row(self) -> list[str]:
        """Return the texts of `SCALING_COLUMNS`."""
        source = "prediction" if self.is_predicted else "measured"
        share = f"{self.communication:.0%} of a step" if self.communication else ""
        speed, gain = shown(self.samples_per_second), f"{shown(self.speed_up, 2)}x"
        gain += f" ± {self.half_width:.0%}" if self.half_width else ""
        return [str(self.devices), speed, gain, f"{self.efficiency:.0%}", share, source]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The curve of one batch size."""

    batch_size: int
    points: tuple[ScalingPoint, ...]
    """By devices. The last two predict twice and four times the most."""
    pays_up_to: float
    """The devices after which the next no longer pays. Infinite: none is known."""

    def sentence(self) -> str:
        """Return the curve as a sentence."""
        measured = [one for one in self.points if not one.is_predicted]
        first, last = measured[0], measured[-1]
        text = (
            f"By the probe, batch {self.batch_size} is {shown(last.speed_up, 2)}x as fast "
            f"(± {last.half_width:.0%}) on {devices_text(last.devices)} as on {first.devices}: "
            f"{last.efficiency:.0%} efficiency"
        )
        if last.communication:
            text += f", {last.communication:.0%} of a step is communication"
        if math.isinf(self.pays_up_to):
            return f"{text}. The next device still pays (prediction)."
        known = {one.devices for one in measured}
        mark = "" if {self.pays_up_to, self.pays_up_to + 1} <= known else " (prediction)"
        return f"{text}. The next device no longer pays after {self.pays_up_to:.0f}{mark}."


def scaling(measured: Sequence[ProbeResult]) -> Scaling | None:
    """Return the curve of the largest batch that was measured well on all numbers of devices.

    Each number has its fastest precision. None: there is one number, or no such batch.
    """
    counts = sorted({one.devices for one in measured})
    measured = [one for one in measured if one.relative_half_width <= _SURE]
    fastest = {n: grid.fastest([one for one in measured if one.devices == n]) for n in counts}
    common = set[int]().union(*fastest.values()).intersection(*fastest.values())
    if len(counts) < 2 or not common:
        return None
    size = max(common)
    cells = {count: found[size] for count, found in fastest.items()}
    factors = fitted({count: size / one.samples_per_second for count, one in cells.items()})
    first, most = counts[0], counts[-1]

    def point(count: int) -> ScalingPoint:
        cell = cells.get(count)
        speed = cell.samples_per_second if cell else size / _seconds(factors, count)
        gain = speed / cells[first].samples_per_second
        share = cell.communication_fraction if cell else 0.0
        half = 0.0
        if cell and count != first:
            half = math.hypot(cell.relative_half_width, cells[first].relative_half_width)
        return ScalingPoint(count, speed, gain, gain * first / count, half, share, cell is None)

    beyond = (
        count
        for count in range(first, _FARTHEST * most)
        if (count + 1) * _seconds(factors, count + 1) ** 2 > count * _seconds(factors, count) ** 2
    )
    points = tuple(point(count) for count in (*counts, 2 * most, 4 * most))
    return Scaling(size, points, next(beyond, math.inf))


def fitted(seconds: Mapping[int, float]) -> list[float]:
    """Return a, b and c by least squares of relative errors, none below 0; c needs three numbers.

    `seconds`: of a step, by the number of devices.
    """
    from scipy.optimize import nnls  # late: it costs a third of a second

    wanted = 3 if len(seconds) > 2 else 2
    rows = [[one / took for one in _terms(count)[:wanted]] for count, took in seconds.items()]
    factors, _ = nnls(rows, [1.0] * len(rows))
    return [*map(float, factors), *[0.0] * (3 - wanted)]


def _terms(count: int) -> tuple[float, float, float]:
    return 1 / count, 1.0, float(count)


def _seconds(factors: Sequence[float], count: int) -> float:
    return math.fsum(map(operator.mul, factors, _terms(count)))

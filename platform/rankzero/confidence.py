"""Confidence intervals for a few measurements. Pure."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence

_ANGLE_BITS = 50
_MOST_FREEDOM = 10_000  # each one costs a multiplication


@functools.lru_cache(maxsize=1024)
def student_t(freedom: int, probability: float = 0.975) -> float:
    """Return Student's t quantile for a probability above a half, to six digits.

    `freedom`: at least 1. More than 10,000 count as 10,000, which changes the fourth digit.
    Source: the closed form of the distribution in Abramowitz & Stegun,
    26.7.3 and 26.7.4, solved by bisection for the angle with the tangent t / sqrt(freedom).
    """
    # SciPy has this function, but its import takes 0.2 s, and rank 0 asks at the run's end.
    freedom = min(freedom, _MOST_FREEDOM)
    low, high = 0.0, math.pi / 2
    for _ in range(_ANGLE_BITS):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _within(middle, freedom) < 2 * probability - 1 else (low, middle)
        )
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _within(angle: float, freedom: int) -> float:
    """Return the probability that t is within plus and minus sqrt(freedom) * tan(angle)."""
    sine, cosine, odd = math.sin(angle), math.cos(angle), freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(2, freedom, 2):
        total += term
        term *= cosine**2 * (power / (power + 1) if odd else (power - 1) / power)
    return 2 / math.pi * (angle + sine * total) if odd else sine * (total + term)


def half_width(values: Sequence[float]) -> float | None:
    """Return half the 95 % interval of the mean, or None with fewer than two values."""
    return _half_width(len(values), statistics.stdev(values)) if len(values) > 1 else None


def _half_width(count: int, deviation: float) -> float:
    return student_t(count - 1) * deviation / math.sqrt(count)


@dataclasses.dataclass
class RunningRatio:
    """The ratio of two sums whose terms come in pairs, and its interval, without a list of them."""

    count: int = 0
    above: float = 0.0
    below: float = 0.0
    _squares: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def add(self, above: float, below: float) -> None:
        """Take in a pair."""
        self.count += 1
        self.above += above
        self.below += below
        aa, ab, bb = self._squares
        self._squares = aa + above**2, ab + above * below, bb + below**2

    @property
    def half_width(self) -> float | None:
        """Return half the 95 % interval of the ratio, or None with fewer than two pairs.

        A residual is what a pair has more than the ratio says (Cochran 1977).
        """
        if self.count < 2:
            return None
        ratio, (aa, ab, bb) = self.above / self.below, self._squares
        residuals = max(0.0, aa - 2 * ratio * ab + ratio**2 * bb)
        deviation = math.sqrt(residuals / (self.count - 1))
        return _half_width(self.count, deviation) * self.count / self.below


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation within groups and its degrees of freedom.

    (0, 0) if no group has two values.
    """
    freedom = sum(len(group) - 1 for group in groups if len(group) > 1)
    squares = math.fsum(
        (value - statistics.fmean(group)) ** 2
        for group in groups
        if len(group) > 1
        for value in group
    )
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)

"""Confidence intervals for a few measurements. Pure."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

_ANGLE_BITS = 50


@functools.lru_cache(maxsize=1024)
def student_t(freedom: int, probability: float = 0.975) -> float:
    """Return Student's t quantile for a probability above a half, to six digits.

    `freedom`: at least 1. Source: the closed form of the distribution in Abramowitz & Stegun,
    26.7.3 and 26.7.4, solved by bisection for the angle with the tangent t / sqrt(freedom).
    """
    # SciPy has this function, but RankZero does not depend on SciPy.
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
    if odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * (total + term)


def half_width(values: Sequence[float]) -> float | None:
    """Return half the 95 % interval of the mean, or None with fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    return student_t(count - 1) * statistics.stdev(values) / math.sqrt(count)


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

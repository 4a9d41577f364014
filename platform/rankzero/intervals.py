"""Confidence intervals of few measurements. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def student_t(freedom: int, probability: float = 0.975) -> float:
    """Return Student's t quantile: exact for 1 and 2 degrees of freedom, else within 0.5 % for 0.95 to 0.995.

    Cornish-Fisher expansion about the normal quantile, Abramowitz & Stegun 26.7.5.
    """
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        central = 2 * probability - 1
        return central * math.sqrt(2 / (1 - central**2))
    z = statistics.NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))


def half_width(values: Sequence[float], probability: float = 0.975) -> float | None:
    """Return half the interval of the mean of independent values; None with fewer than two."""
    count = len(values)
    if count < 2:
        return None
    return student_t(count - 1, probability) * statistics.stdev(values) / math.sqrt(count)


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation within groups, and its degrees of freedom; (0, 0) without a group of two."""
    freedom = sum(len(group) - 1 for group in groups if len(group) > 1)
    squares = math.fsum((value - statistics.fmean(group)) ** 2 for group in groups if len(group) > 1 for value in group)
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)

"""When a speed may be believed: warm-up until windows agree, then batch means until the interval is narrow. Pure.

Step times are correlated, so a window of many steps counts as one observation (the method of batch means; Law &
Kelton): with windows much longer than the correlation they are nearly independent, and what correlation is left between
neighbours widens the interval.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics

from rankzero.confidence import half_width

AGREE = 0.05  # two windows in a row that differ by less: warm
FEWEST, MOST_WARM_UP = 5, 12  # windows


@dataclasses.dataclass
class Steady:
    """Windows of equal work, in seconds each; asked after every one whether it is enough."""

    relative: float = 0.01
    """Half the 95 % interval over the mean, to be reached."""
    most_seconds: float = 6.0
    """The cap, warm-up not counted."""
    warm: bool = False
    warm_up: list[float] = dataclasses.field(default_factory=list)
    windows: list[float] = dataclasses.field(default_factory=list)

    def add(self, seconds: float) -> None:
        """Add a window."""
        if self.warm:
            self.windows.append(seconds)
            return
        if self.warm_up:
            before = self.warm_up[-1]
            self.warm = abs(seconds - before) <= AGREE * before or len(self.warm_up) >= MOST_WARM_UP
        self.warm_up.append(seconds)

    @property
    def enough(self) -> bool:
        """Tell whether the interval is narrow, or the time is up."""
        if len(self.windows) < FEWEST:
            return False
        return self.relative_half_width <= self.relative or sum(self.windows) >= self.most_seconds

    @property
    def mean(self) -> float:
        """Return the mean seconds of a window."""
        return statistics.fmean(self.windows)

    @property
    def relative_half_width(self) -> float:
        """Return half the 95 % interval over the mean, widened for what neighbours have in common."""
        half = half_width(self.windows)
        return math.inf if half is None else half * math.sqrt(inflation(self.windows)) / self.mean


def inflation(values: list[float]) -> float:
    """Return by how much neighbours' correlation inflates the variance of the mean: (1 + r) / (1 - r) for AR(1).

    The lag-1 estimate of few values is too low by about (1 + 4 r) / n (Kendall 1954), which is put back.
    """
    count = len(values)
    mean = statistics.fmean(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    if count < 3 or not spread:
        return 1.0
    lagged = math.fsum((a - mean) * (b - mean) for a, b in itertools.pairwise(values)) / spread
    r = min(0.9, max(0.0, lagged + (1 + 4 * max(0.0, lagged)) / count))
    return (1 + r) / (1 - r)

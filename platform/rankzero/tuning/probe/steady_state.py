"""Decide when a measured speed is steady, and how exact it is. Pure.

First windows warm up until two in a row agree. Then windows are measured until the confidence
interval is narrow. Step times are correlated, so one window of many steps counts as one observation
(the method of batch means; Law & Kelton). Windows much longer than the correlation are nearly
independent, and the correlation that is left between neighbours widens the interval.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics

from rankzero.confidence import half_width

_AGREEMENT = 0.05  # the relative difference of two windows in a row, once it is warm
_WANTED = 0.01  # half the 95 % interval over the mean
FEWEST = 5
"""Windows that are measured at least."""
_MOST_WARM_UP = 12
_SLOW = 10.0  # over the limit: a window so long is one step of many seconds, and two must do


@dataclasses.dataclass
class SteadyState:
    """Windows of equal work, in seconds each. Ask after every one whether it is `enough`."""

    most_seconds: float
    """The limit of the measurement, without the warm-up."""
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
            agree = abs(seconds - before) <= _AGREEMENT * before
            # A speed that never settles is measured all the same. Its interval will be wide.
            self.warm = agree or len(self.warm_up) >= _MOST_WARM_UP
            self.warm |= seconds > _SLOW * self.most_seconds
        self.warm_up.append(seconds)

    @property
    def enough(self) -> bool:
        """Return whether the interval is narrow, or the time is up."""
        is_slow = bool(self.windows) and self.windows[0] > _SLOW * self.most_seconds
        if len(self.windows) < (2 if is_slow else FEWEST):
            return False
        return self.relative_half_width <= _WANTED or sum(self.windows) >= self.most_seconds

    @property
    def mean(self) -> float:
        """Return the mean seconds of a window."""
        return statistics.fmean(self.windows)

    @property
    def relative_half_width(self) -> float:
        """Return half the 95 % interval over the mean, widened for the windows' correlation."""
        half = half_width(self.windows)
        return math.inf if half is None else half * math.sqrt(_inflation(self.windows)) / self.mean


def _inflation(values: list[float]) -> float:
    """Return the factor by which correlated neighbours raise the variance of the mean.

    It is (1 + r) / (1 - r) for an AR(1) process with the lag-1 correlation r. The estimate of r
    from few values is too low by about (1 + 4 r) / n (Kendall 1954), which is added back.
    """
    count = len(values)
    mean = statistics.fmean(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    if count < 3 or not spread:
        return 1.0
    lagged = math.fsum((a - mean) * (b - mean) for a, b in itertools.pairwise(values)) / spread
    r = min(0.9, max(0.0, lagged + (1 + 4 * max(0.0, lagged)) / count))
    return (1 + r) / (1 - r)

"""The totals of a run: samples per second with a confidence interval, and where the time went."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from rankzero.confidence import half_width
from rankzero.training.metrics.straggler import straggler
from rankzero.training.metrics.window import WindowStats

# The first windows include the warm-up.
WARM_UP_WINDOWS = 2


@dataclasses.dataclass
class RunTotals:
    """The loop's sums for the run's summary. Evaluations and checkpoints do not count."""

    windows: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """Each window's samples and seconds."""
    rates: list[Mapping[str, float]] = dataclasses.field(default_factory=list)
    """Each window's tokens per second and FLOP/s utilisation, if they are known."""
    forwards: list[float] = dataclasses.field(default_factory=list)
    """Each rank's seconds of forwards, one forward a window."""
    data_waits: list[float] = dataclasses.field(default_factory=list)
    """Each rank's seconds of waiting for data."""
    steps: int = 0
    train_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    """The waits of the rank that waited longest, in each window."""
    blocked_seconds: float = 0.0
    """The time of waiting for checkpoints."""
    best: float | None = None
    last_metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(
        self, window: WindowStats, samples: int, rates: Mapping[str, float] | None = None
    ) -> None:
        """Add one window, or several as one, the samples of its steps, and its other rates."""
        self.windows.append((samples, window.seconds))
        self.rates.append(rates or {})
        # The sums are empty before the first window.
        forwards = itertools.zip_longest(self.forwards, window.forwards, fillvalue=0.0)
        data_waits = itertools.zip_longest(self.data_waits, window.data_waits, fillvalue=0.0)
        self.forwards, self.data_waits = list(map(sum, forwards)), list(map(sum, data_waits))
        self.steps += window.steps
        self.train_seconds += window.seconds
        self.data_wait_seconds += window.data_wait_seconds

    def summary(self) -> dict[str, float]:
        """Return the run's figures, without those that were not measured."""
        # The method of batch means: windows of about a second are nearly independent.
        steady = [one for one in self.windows[WARM_UP_WINDOWS:] if one[1] > 0]
        speed = data_wait_fraction = None
        if steady:
            speed = sum(samples for samples, _ in steady) / sum(seconds for _, seconds in steady)
        if self.train_seconds:
            data_wait_fraction = self.data_wait_seconds / self.train_seconds
        timed = list(zip(self.rates, self.windows, strict=True))[WARM_UP_WINDOWS:]
        figures = {
            **{
                name: sum(rates.get(name, 0.0) * seconds for rates, (_, seconds) in timed)
                / sum(seconds for _, (_, seconds) in timed)
                for name in (timed[0][0] if timed else ())
            },
            "best": self.best,
            "samples_per_second": speed,
            "samples_per_second_half_width": half_width([n / seconds for n, seconds in steady]),
            "steps": float(self.steps),
            "train_seconds": self.train_seconds,
            "data_wait_fraction": data_wait_fraction,
            "checkpoint_blocked_seconds": self.blocked_seconds,
            **straggler(len(self.windows), self.train_seconds, self.forwards, self.data_waits),
        }
        measured = {name: value for name, value in figures.items() if value is not None}
        return {**self.last_metrics, **measured}

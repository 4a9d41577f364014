"""The totals of a run: samples per second with a confidence interval, and where the time went."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from rankzero.confidence import RunningRatio
from rankzero.training.metrics.straggler import straggler
from rankzero.training.metrics.window import WindowStats

# The first windows include the warm-up.
_WARM_UP_WINDOWS = 2


@dataclasses.dataclass
class RunTotals:
    """The loop's sums for the run's summary. Evaluations and checkpoints do not count."""

    windows: int = 0
    steady: RunningRatio = dataclasses.field(default_factory=RunningRatio)
    """The samples and seconds of the windows after the warm-up."""
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    """The steady windows' tokens per second and FLOP/s utilisation, times their seconds."""
    forwards: list[float] = dataclasses.field(default_factory=list)
    """Each rank's seconds of forwards, one forward a steady window."""
    data_waits: list[float] = dataclasses.field(default_factory=list)
    """Each rank's seconds of waiting for data, in the steady windows."""
    steps: int = 0
    train_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    """The waits of the rank that waited longest, in each window."""
    blocked_seconds: float = 0.0
    """The time of waiting for checkpoints."""
    peak_megabytes: float | None = None
    """The memory of the rank that held the most. None: the training did not come to its end."""
    best: float | None = None
    last_metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(
        self,
        window: WindowStats,
        samples: int,
        rates: Mapping[str, float] | None = None,
        *,
        was_suspended: bool = False,
    ) -> None:
        """Add one window, or several as one, the samples of its steps, and its other rates.

        `was_suspended`: its time is estimated, and says nothing of the speed.
        """
        # Sums, and no list of windows: a run may last for months.
        self.windows += not was_suspended
        if self.windows > _WARM_UP_WINDOWS and window.seconds > 0 and not was_suspended:
            self.steady.add(samples, window.seconds)
            for name, rate in (rates or {}).items():
                self.rates[name] = self.rates.get(name, 0.0) + rate * window.seconds
            # The sums are empty before the first such window.
            forwards = itertools.zip_longest(self.forwards, window.forwards, fillvalue=0.0)
            data_waits = itertools.zip_longest(self.data_waits, window.data_waits, fillvalue=0.0)
            self.forwards, self.data_waits = list(map(sum, forwards)), list(map(sum, data_waits))
        self.steps += window.steps
        self.train_seconds += window.seconds
        self.data_wait_seconds += window.data_wait_seconds

    def summary(self) -> dict[str, float]:
        """Return the run's figures, without those that were not measured."""
        steady = self.steady.below
        figures = {
            **{name: total / steady for name, total in self.rates.items()},
            "best": self.best,
            "peak_memory_megabytes": self.peak_megabytes,
            "samples_per_second": self.steady.above / steady if steady else None,
            # The method of batch means: windows are nearly independent, and may be short.
            "samples_per_second_half_width": self.steady.half_width,
            "steps": float(self.steps),
            "train_seconds": self.train_seconds,
            "data_wait_fraction": (
                self.data_wait_seconds / self.train_seconds if self.train_seconds else None
            ),
            "checkpoint_blocked_seconds": self.blocked_seconds,
            **straggler(self.windows - _WARM_UP_WINDOWS, steady, self.forwards, self.data_waits),
        }
        measured = {name: value for name, value in figures.items() if value is not None}
        return {**self.last_metrics, **measured}

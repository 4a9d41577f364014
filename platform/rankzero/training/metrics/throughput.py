"""Samples per second with a confidence interval, and the totals of a run."""

from __future__ import annotations

import dataclasses

from rankzero.confidence import half_width
from rankzero.training.metrics.straggler import RankTimes
from rankzero.training.metrics.window import WindowStats


class Throughput:
    """Samples per second in the steady state, with a 95 % confidence interval.

    Method of batch means: each window is one mean.
    """

    def __init__(self, warmup_windows: int = 2) -> None:
        self._skip = warmup_windows
        self._windows: list[tuple[int, float]] = []

    def add(self, samples: int, seconds: float) -> None:
        """Add a window."""
        # Windows of about a second are nearly independent. The first ones include the warm-up.
        if self._skip:
            self._skip -= 1
        elif seconds > 0:
            self._windows.append((samples, seconds))

    @property
    def samples_per_second(self) -> float | None:
        """All samples over all seconds, or None before the first window after the warm-up."""
        if not self._windows:
            return None
        samples, seconds = map(sum, zip(*self._windows, strict=True))
        return samples / seconds

    @property
    def half_width(self) -> float | None:
        """Half the 95 % interval, in samples per second, or None with fewer than two windows."""
        return half_width([samples / seconds for samples, seconds in self._windows])


@dataclasses.dataclass
class RunTotals:
    """What the loop adds up for the run's summary."""

    throughput: Throughput = dataclasses.field(default_factory=Throughput)
    rank_times: RankTimes = dataclasses.field(default_factory=RankTimes)
    steps: int = 0
    train_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    blocked_seconds: float = 0.0
    """Of waiting for checkpoints."""
    best: float | None = None
    last_metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, window: WindowStats, batch_size: int) -> None:
        """Add one window, or several as one."""
        # Windows do not contain evaluations and checkpoints, so these do not count.
        self.throughput.add(window.steps * batch_size, window.seconds)
        self.rank_times.add(window.seconds, window.forwards, window.data_waits)
        self.steps += window.steps
        self.train_seconds += window.seconds
        self.data_wait_seconds += window.data_wait_seconds

    def summary(self) -> dict[str, float]:
        """Return the run's figures, without those that were not measured."""
        data_wait_fraction = None
        if self.train_seconds:
            data_wait_fraction = self.data_wait_seconds / self.train_seconds
        figures = {
            "best": self.best,
            "samples_per_second": self.throughput.samples_per_second,
            "samples_per_second_half_width": self.throughput.half_width,
            "steps": float(self.steps),
            "train_seconds": self.train_seconds,
            "data_wait_fraction": data_wait_fraction,
            "checkpoint_blocked_seconds": self.blocked_seconds,
            **self.rank_times.straggler(),
        }
        measured = {name: value for name, value in figures.items() if value is not None}
        return {**self.last_metrics, **measured}

"""Samples per second with a confidence interval."""

from __future__ import annotations

import dataclasses

from rankzero.confidence import half_width
from rankzero.training.metrics.straggler import RankTimes
from rankzero.training.metrics.window import WindowStats


class Throughput:
    """Samples per second in the steady state, with a 95 % confidence interval, by the method of batch means.

    Each window is one batch mean; windows are long enough (about a second) to be nearly
    independent. Evaluations, checkpoints and the warm-up windows never enter.
    """

    def __init__(self, warmup_windows: int = 2) -> None:
        self._skip = warmup_windows
        self._windows: list[tuple[int, float]] = []

    def add(self, samples: int, seconds: float) -> None:
        """Add a window."""
        if self._skip:
            self._skip -= 1
        elif seconds > 0:
            self._windows.append((samples, seconds))

    @property
    def samples_per_second(self) -> float | None:
        """All samples over all seconds; None before the first window after the warm-up."""
        if not self._windows:
            return None
        return sum(samples for samples, _ in self._windows) / sum(
            seconds for _, seconds in self._windows
        )

    @property
    def half_width(self) -> float | None:
        """Half the 95 % interval, in samples per second; None with fewer than two windows."""
        return half_width([samples / seconds for samples, seconds in self._windows])


@dataclasses.dataclass
class RunTotals:
    """What the run's summary is made of."""

    throughput: Throughput = dataclasses.field(default_factory=Throughput)
    rank_times: RankTimes = dataclasses.field(default_factory=RankTimes)
    steps: int = 0
    train_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    blocked_seconds: float = 0.0
    best: float | None = None
    last_metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, report: WindowStats, batch_size: int) -> None:
        self.throughput.add(report.steps * batch_size, report.seconds)
        self.rank_times.add(report.seconds, report.forwards, report.data_waits)
        self.steps += report.steps
        self.train_seconds += report.seconds
        self.data_wait_seconds += report.data_wait_seconds

    def summary(self) -> dict[str, float]:
        """Return the run's figures; one that was not measured is left out."""
        figures = {
            "best": self.best,
            "samples_per_second": self.throughput.samples_per_second,
            "samples_per_second_half_width": self.throughput.half_width,
            "steps": float(self.steps),
            "train_seconds": self.train_seconds,
            "data_wait_fraction": self.data_wait_seconds / self.train_seconds
            if self.train_seconds
            else None,
            "checkpoint_blocked_seconds": self.blocked_seconds,
            **self.rank_times.straggler(),
        }
        return {
            **self.last_metrics,
            **{name: value for name, value in figures.items() if value is not None},
        }

"""Find the rank that makes the others wait, by what each does before it waits for another."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

# Times the median of the others. Less is noise on a machine that other programs use too.
SLOWER = 1.25
# More waiting for data than the others' median, as a fraction of the time.
LATER = 0.1
# Fewer windows show no pattern.
WINDOWS = 5


class ForwardTimer(Protocol):
    """Times forwards."""

    def timed(self, measure: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call instead of `measure`."""

    def read(self) -> float:
        """Return the seconds of a forward, or 0 if none was timed."""


class EventTimer:
    """Times the first forward of each window, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: tuple[Any, Any] | None = None

    def timed(self, measure: Callable[..., Any]) -> Callable[..., Any]:
        """Return `measure`, timed unless this window has a time already."""
        # One forward a window is enough, and costs the other steps nothing.
        if self._marks is not None:
            return measure

        def measure_timed(*args: Any) -> Any:
            begin = self._mark()
            values = measure(*args)
            self._marks = begin, self._mark()
            return values

        return measure_timed

    def read(self) -> float:
        """Return the seconds, or 0 if there was no forward, and start the next window.

        Call it only once the device has computed the forward.
        """
        marks, self._marks = self._marks, None
        if marks is None:
            return 0.0
        begin, end = marks
        return float(begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        # The GPU takes the time when it gets there. The host goes on without waiting.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclasses.dataclass
class RankTimes:
    """What each rank's windows took, added up."""

    windows: int = 0
    seconds: float = 0.0
    forward: list[float] = dataclasses.field(default_factory=list)
    data_wait: list[float] = dataclasses.field(default_factory=list)

    def add(self, seconds: float, forward: Sequence[float], data_wait: Sequence[float]) -> None:
        """Add one window: its seconds, and every rank's forward and wait for data."""
        self.windows += 1
        self.seconds += seconds
        self.forward = _added(self.forward, forward)
        self.data_wait = _added(self.data_wait, data_wait)

    def straggler(self) -> dict[str, float]:
        """Return the figures of the rank that makes the others wait, or {} if no rank does.

        The keys are those of a run's summary.
        """
        if self.windows < WINDOWS or len(self.forward) < 2 or not all(self.forward):
            return {}
        late, median = _highest(self.data_wait)
        if (self.data_wait[late] - median) / self.seconds >= LATER:
            return {
                "straggler_rank": late,
                "straggler_data_wait_fraction": self.data_wait[late] / self.seconds,
            }
        slow, median = _highest(self.forward)
        if self.forward[slow] >= SLOWER * median:
            return {"straggler_rank": slow, "straggler_forward_ratio": self.forward[slow] / median}
        return {}


def _highest(values: Sequence[float]) -> tuple[int, float]:
    """Return the rank with the highest value, and the median of the others."""
    rank = max(range(len(values)), key=values.__getitem__)
    return rank, statistics.median([*values[:rank], *values[rank + 1 :]])


def _added(sums: Sequence[float], more: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else list(more)

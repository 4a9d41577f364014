"""Which rank keeps the others waiting: by what each does before it waits for anybody."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

SLOWER = 1.25  # times the others' median: less is noise on a machine that does other things, too
LATER = 0.1  # of the time waited for data, more than the others
WINDOWS = 5  # fewer are no pattern


class ForwardTimer(Protocol):
    """What a forward is timed with."""

    def timed(self, measure: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call in the place of `measure`."""

    def read(self) -> float:
        """Return the seconds of a forward, 0 where none was timed."""


class EventTimer:
    """Times the first forward of each window, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: tuple[Any, Any] | None = None

    def timed(self, measure: Callable[..., Any]) -> Callable[..., Any]:
        """Return `measure`, timed where this window has no time yet."""
        return measure if self._marks is not None else lambda *given: self._once(measure, *given)

    def read(self) -> float:
        """Return the seconds, 0 where there was no forward, and begin anew. Only once the device has computed it."""
        marks, self._marks = self._marks, None
        if marks is None:
            return 0.0
        return float(
            marks[0].elapsed_time(marks[1]) / 1000 if self._on_gpu else marks[1] - marks[0]
        )

    def _once(self, measure: Callable[..., Any], *given: Any) -> Any:
        begun = self._mark()
        values = measure(*given)
        self._marks = begun, self._mark()
        return values

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
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
        self.windows += 1
        self.seconds += seconds
        self.forward = _summed(self.forward, forward)
        self.data_wait = _summed(self.data_wait, data_wait)

    def straggler(self) -> dict[str, float]:
        """Return the figures of the rank that keeps the others waiting, as a run's summary has them; none: empty."""
        if self.windows < WINDOWS or len(self.forward) < 2 or not all(self.forward):
            return {}
        late, waited = _last(self.data_wait)
        fraction = (self.data_wait[late] - waited) / self.seconds
        if fraction >= LATER:
            return {
                "straggler_rank": late,
                "straggler_data_wait_fraction": self.data_wait[late] / self.seconds,
            }
        slow, median = _last(self.forward)
        if self.forward[slow] >= SLOWER * median:
            return {"straggler_rank": slow, "straggler_forward_ratio": self.forward[slow] / median}
        return {}


def _last(values: Sequence[float]) -> tuple[int, float]:
    """Return the rank with the largest value, and the others' median."""
    rank = max(range(len(values)), key=values.__getitem__)
    return rank, statistics.median([*values[:rank], *values[rank + 1 :]])


def _summed(sums: Sequence[float], more: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else list(more)

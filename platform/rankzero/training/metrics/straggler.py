"""Find the rank that makes the others wait, by what each does before it waits for another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# Times the median of the others. Less is noise on a machine that other programs use too.
_SLOWER = 1.25
# More waiting for data than the others' median, as a fraction of the time.
_LATER = 0.1
# Fewer windows show no pattern.
_WINDOWS = 5
# Seconds. A second mark for each shorter wait would slow down steps that are all launches.
_SHORT_WAIT = 1e-4


def gpu_mark() -> Any:
    """Return an event. The GPU takes its time when it gets there, and the host continues."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class TimedBatches:
    """Batches, and how long the steps wait for them. On a GPU: how long it stands idle.

    Launches do not wait for the GPU, so a batch may load while the step before is computed.
    """

    def __init__(
        self, batches: Iterator[Any], device: torch.device, mark: Callable[[], Any] = gpu_mark
    ) -> None:
        self._next, self._mark = batches.__next__, mark if device.type == "cuda" else None
        self._seconds, self._marks = 0.0, list[tuple[Any, Any]]()

    def __iter__(self) -> TimedBatches:
        return self

    def __next__(self) -> Any:
        before: Any = None if self._mark is None else self._mark()
        begun = time.perf_counter()
        batch = self._next()
        seconds = time.perf_counter() - begun
        if self._mark is not None and seconds >= _SHORT_WAIT:
            # Also while the GPU computes: its kernels may wait for the copy of this batch.
            self._marks.append((before, self._mark()))
        # An event that has passed: the GPU has nothing to do, and the host holds it up.
        elif self._mark is None or before.query():
            self._seconds += seconds
        return batch

    def read(self) -> float:
        """Return the seconds since the last call. Call it only once the device has computed all."""
        idle = sum(before.elapsed_time(after) for before, after in self._marks) / 1000
        seconds, self._seconds, self._marks = self._seconds + float(idle), 0.0, []
        return seconds


class ForwardTimer:
    """Times the first call of `measure` in each window, without waiting for the device.

    `check`: called with what a timed call returned. A check of each call would cost time.
    """

    def __init__(
        self,
        device: torch.device,
        measure: Callable[..., Any],
        check: Callable[[Any], object] = lambda _: None,
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self.measure, self._check = measure, check
        self._marks: tuple[Any, Any] | None = None

    def next_measure(self) -> Callable[..., Any]:
        """Return `measure`, timed unless this window has a time already."""
        # One forward a window is enough, and costs the other steps nothing.
        if self._marks is not None:
            return self.measure

        def measure_timed(*args: Any) -> Any:
            begin = self._mark()
            values = self.measure(*args)
            self._marks = begin, self._mark()
            self._check(values)
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
        return gpu_mark() if self._on_gpu else time.perf_counter()


def straggler(
    windows: int, seconds: float, forwards: Sequence[float], data_waits: Sequence[float]
) -> dict[str, float]:
    """Return the figures of the rank that makes the others wait, or {} if no rank does. Pure.

    `forwards` and `data_waits` are each rank's seconds, summed over the windows. The keys are those
    of a run's summary.
    """
    if windows < _WINDOWS or len(forwards) < 2 or not all(forwards):
        return {}
    # Waiting for data comes first: it also delays the forward.
    late, median = _highest(data_waits)
    if (data_waits[late] - median) / seconds >= _LATER:
        return {"straggler_rank": late, "straggler_data_wait_fraction": data_waits[late] / seconds}
    slow, median = _highest(forwards)
    if forwards[slow] >= _SLOWER * median:
        return {"straggler_rank": slow, "straggler_forward_ratio": forwards[slow] / median}
    return {}


def _highest(values: Sequence[float]) -> tuple[int, float]:
    """Return the rank with the highest value, and the median of the others."""
    rank = max(range(len(values)), key=values.__getitem__)
    return rank, statistics.median([*values[:rank], *values[rank + 1 :]])

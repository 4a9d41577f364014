"""Which rank makes the others wait."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from rankzero.ranks import Ranks
from rankzero.reporting.run_facts import straggler as told
from rankzero.training.build import build
from rankzero.training.distributed.world import World
from rankzero.training.evaluation import evaluate_goal
from rankzero.training.metrics.straggler import ForwardTimer, TimedBatches, straggler
from rankzero.training.stop import StopRequest
from support.training import tiny


def paces(forward: list[float], data_wait: list[float], windows: int = 10) -> dict[str, float]:
    """Return the straggler of windows of a second, each with the same times of the ranks."""
    sums = [[windows * one for one in each] for each in (forward, data_wait)]
    return straggler(windows, float(windows), *sums)


def test_a_rank_that_computes_longer_is_the_straggler() -> None:
    found = paces([0.1, 0.1, 0.19, 0.1], [0.0] * 4)
    assert found == {"straggler_rank": 2, "straggler_forward_ratio": pytest.approx(1.9)}
    assert told(found) == "rank 2 computes 1.9x as long as the others"


def test_a_rank_that_waits_for_data_is_the_straggler_first() -> None:
    found = paces([0.1, 0.2], [0.35, 0.02])
    assert found == {"straggler_rank": 0, "straggler_data_wait_fraction": pytest.approx(0.35)}
    assert told(found) == "rank 0 waits for its data 35% of the time"


@pytest.mark.parametrize(
    "found",
    [
        paces([0.1, 0.11], [0.0, 0.05]),
        paces([0.1], [0.5]),
        paces([0.1, 0.3], [0.0, 0.0], windows=3),
        paces([0.0, 0.3], [0.0, 0.0]),
        straggler(0, 0.0, [], []),
    ],
)
def test_noise_few_windows_and_untimed_forwards_show_no_straggler(
    found: dict[str, float],
) -> None:
    assert found == {} and told(found) is None


def test_the_first_forward_of_a_window_is_timed() -> None:
    def measure(a: int, b: int) -> int:
        time.sleep(0.02)
        return a + b

    watch = ForwardTimer(torch.device("cpu"), measure)
    assert watch.read() == 0.0
    assert watch.next_measure()(1, 2) == 3
    assert watch.next_measure() is measure, "later forwards of the window are left alone"
    assert 0.02 <= watch.read() < 0.3 and watch.read() == 0.0


class Event:
    """An event of a GPU that computes until `busy`."""

    busy = 0.0

    def __init__(self) -> None:
        self.at = max(time.perf_counter(), self.busy)

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.at - self.at)


@pytest.mark.parametrize(("computes", "waits"), [(0.0, 0.05), (0.03, 0.02), (60.0, 0.0)])
def test_what_loads_while_a_gpu_computes_is_no_wait(
    computes: float, waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> Iterator[int]:
        yield 1  # as fast as data in memory
        time.sleep(0.05)
        yield 2

    begun = time.perf_counter()
    monkeypatch.setattr(Event, "busy", begun + computes)
    timed = TimedBatches(load(), torch.device("cuda"), Event)
    assert list(timed) == [1, 2]
    took = time.perf_counter() - begun
    assert waits - 1e-3 <= timed.read() <= max(0.0, took - computes) and timed.read() == 0.0


def test_an_evaluation_is_not_timed() -> None:
    job, state = build(tiny(), World(Ranks(), torch.device("cpu")))
    evaluate_goal(job, state, StopRequest())
    assert job.forward_timer.read() == 0.0

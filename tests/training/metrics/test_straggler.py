"""Which rank makes the others wait."""

from __future__ import annotations

import time

import pytest
import torch

from rankzero.reporting.run_report import straggler as told
from rankzero.training.metrics.straggler import EventTimer, RankTimes


def paces(forward: list[float], data_wait: list[float], windows: int = 10) -> RankTimes:
    found = RankTimes()
    for _ in range(windows):
        found.add(1.0, forward, data_wait)
    return found


def test_a_rank_that_computes_longer_is_the_straggler() -> None:
    found = paces([0.1, 0.1, 0.19, 0.1], [0.0] * 4).straggler()
    assert found == {"straggler_rank": 2, "straggler_forward_ratio": pytest.approx(1.9)}
    assert told(found) == "rank 2 computes 1.9x as long as the others"


def test_a_rank_that_waits_for_data_is_the_straggler_first() -> None:
    found = paces([0.1, 0.2], [0.35, 0.02]).straggler()
    assert found == {"straggler_rank": 0, "straggler_data_wait_fraction": pytest.approx(0.35)}
    assert told(found) == "rank 0 waits for its data 35% of the time"


@pytest.mark.parametrize(
    "found",
    [
        paces([0.1, 0.11], [0.0, 0.05]),
        paces([0.1], [0.5]),
        paces([0.1, 0.3], [0.0, 0.0], windows=3),
        paces([0.0, 0.3], [0.0, 0.0]),
        RankTimes(),
    ],
)
def test_noise_few_windows_and_untimed_forwards_show_no_straggler(found: RankTimes) -> None:
    assert found.straggler() == {} and told(found.straggler()) is None


def test_the_first_forward_of_a_window_is_timed() -> None:
    watch = EventTimer(torch.device("cpu"))
    assert watch.read() == 0.0
    assert watch.timed(lambda a, b: time.sleep(0.02) or a + b)(1, 2) == 3
    assert watch.timed(time.sleep) is time.sleep, "later forwards of the window are left alone"
    assert 0.02 <= watch.read() < 0.3 and watch.read() == 0.0

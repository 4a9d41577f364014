"""Advice on data that comes too late."""

from __future__ import annotations

import pytest

from rankzero.cli.display.data_wait import DataWait, remedy
from rankzero.events import RunStarted, StepsLogged


def advised(fractions: list[float], *, seconds: float = 1.0) -> list[tuple[int, str]]:
    watch = DataWait(0, 1, 4)
    told = [
        (step, watch(window(step, step * seconds, fraction)))
        for step, fraction in enumerate(fractions)
    ]
    return [(step, text) for step, text in told if text is not None]


def window(step: int, time: float, fraction: float) -> StepsLogged:
    return StepsLogged([step], [time], {"throughput/data_wait_fraction": [fraction]})


def test_lasting_wait_gets_advice_once() -> None:
    told = advised([0.9, 0.9] + [0.4] * 20)
    assert [step for step, _ in told] == [7], "two windows skipped, five seconds watched"
    assert "40% of the time: set train.workers=3" in told[0][1]


@pytest.mark.parametrize(
    "fractions", [[0.9, 0.9] + [0.1] * 30, [0.1] * 10 + [0.9] + [0.1] * 10, [0.9] * 4]
)
def test_start_or_short_wait_gets_no_advice(fractions: list[float]) -> None:
    assert advised(fractions) == []


def test_late_wait_gets_advice() -> None:
    assert len(advised([0.0] * 50 + [0.5] * 10)) == 1


def test_each_attempt_gets_its_own_advice() -> None:
    watch = DataWait(0, 1, 4)
    told = [watch(window(step, step, 0.5)) for step in range(20)]
    watch(RunStarted(20.0, {}, {}, 2))
    told += [watch(window(step, step, 0.5)) for step in range(20, 40)]
    assert sum(text is not None for text in told) == 2


def test_more_workers_are_advised_only_with_free_cores() -> None:
    assert "set train.workers=3 (now 1" in remedy(1, 2, 8)
    assert "set train.workers=16 (now 8; 64 cores, 1 rank)" in remedy(8, 1, 64)
    assert "TensorDataset" in remedy(3, 2, 8) and "TensorDataset" in remedy(0, 2, 2)

"""Strategies to compare, speed-ups, warnings and tables, on numbers made by hand."""

from __future__ import annotations

import dataclasses

import pytest

from rankzero.compare import tables
from rankzero.compare.results import (
    StrategyResult,
    StrategyRun,
    strategy_runs,
    warnings,
    with_speed_ups,
)
from rankzero.errors import UserError
from rankzero.reporting import html_page
from rankzero.training.profiling.profiler import OperatorCost, Profile
from rankzero.training.profiling.spans import StepBreakdown

ONE = StrategyResult(
    StrategyRun("single", 1),
    100.0,
    1000.0,
    10.0,
    500.0,
    breakdown=StepBreakdown(0.27, 0.54, 0.09, 0.0, 0.05, 0.05),
)
TWO = StrategyResult(
    StrategyRun("ddp", 2),
    55.0,
    1800.0,
    20.0,
    520.0,
    breakdown=StepBreakdown(0.09, 0.18, 0.03, 0.5, 0.1, 0.1),
)
LOST = StrategyResult(StrategyRun("dp", 2), reason="there is none: use ddp")


def names(strategies: list[str], devices: list[int]) -> list[str]:
    return [run.name for run in strategy_runs(strategies, devices)]


def test_one_run_on_one_device_and_every_strategy_on_several() -> None:
    assert names(["single", "dp", "ddp"], [1, 2, 4]) == [
        "single-1",
        "dp-2",
        "ddp-2",
        "dp-4",
        "ddp-4",
    ]
    assert names(["ddp", "fsdp"], [2, 1]) == ["ddp-1", "ddp-2", "fsdp-2"]
    assert [run.processes for run in strategy_runs(["single", "dp", "ddp"], [1, 4])] == [1, 1, 4]
    # Of the default strategies, those that have a meaning are enough.
    assert [run.name for run in strategy_runs(["single", "ddp"], [2], typed=False)] == ["ddp-2"]


@pytest.mark.parametrize(
    ("strategies", "devices", "message"),
    [
        (["dpp"], [1], "no strategy is called 'dpp': choose of single, dp"),
        (["ddp"], [0], "numbers of devices of at least 1"),
        (["single"], [2], "single is one device: add 1"),
        (["single", "ddp", "tp"], [2], "single is one device: add 1"),
    ],
)
def test_invalid_strategies_or_devices_raise(
    strategies: list[str], devices: list[int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        strategy_runs(strategies, devices)


def test_speed_ups_are_relative_to_the_first_run() -> None:
    first, second, lost = with_speed_ups([ONE, TWO, LOST])
    assert (first.speed_up, second.speed_up, lost.speed_up) == (1.0, 1.8, None)
    assert second.efficiency == 0.9 and lost.efficiency is None
    again = with_speed_ups([LOST, TWO])
    assert again[1].speed_up == 1.0 and again[1].efficiency == 1.0


def test_the_table_and_the_sentence() -> None:
    found = with_speed_ups([ONE, TWO, LOST])
    assert tables.cells(found[1]) == [
        "ddp",
        "2",
        "55 s",
        "1,800 ± 1.1%",
        "1.80x",
        "90%",
        "520 MB",
        "",
        "",
        "communication 50%",
    ]
    assert tables.cells(found[2])[2] == "not run" and len(tables.cells(found[2])) == len(
        tables.COLUMNS
    )
    head, body = tables.table(found)
    assert "GPU" not in head and "memory" in head and {len(line) for line in body} == {len(head)}
    assert tables.reasons(found) == [
        "dp-2: there is none: use ddp"
    ] and "Not run: dp-2" in tables.markdown(found, [])
    assert tables.sentence(found) == (
        "Fastest: ddp on 2 devices with 1,800 samples/s, 1.80x single on 1 device (90% of ideal)."
    )
    assert (
        tables.sentence(with_speed_ups([ONE]))
        == "Nothing is faster than single on 1 device: 1,000 samples/s."
    )
    assert tables.sentence(with_speed_ups([LOST])) == "Nothing could be measured."
    close = dataclasses.replace(ONE, samples_per_second=1750.0, half_width=40.0)
    assert tables.sentence(with_speed_ups([ONE, TWO, close])).endswith(
        "of ideal); as fast within the intervals: single on 1 device."
    )
    assert tables.markdown(found, ["x"]).count("\n| ") == 4


def test_warnings_of_unfair_comparisons() -> None:
    slow = StrategyResult(
        StrategyRun("ddp", 2),
        1.0,
        10.0,
        1.0,
        breakdown=StepBreakdown(0.09, 0.18, 0.03, 0.1, 0.5, 0.1),
    )
    assert any("ddp-2: waiting for data" in note for note in warnings([ONE, slow], False, False))
    assert any("OMP_NUM_THREADS=1" in note for note in warnings([ONE, TWO], True, False))
    assert warnings([ONE, TWO, LOST], True, True) == []
    assert (
        "too short" in warnings([StrategyResult(StrategyRun("ddp", 2), 1.0, 10.0)], False, True)[0]
    )


def test_the_text_of_a_profile() -> None:
    profile = Profile(
        0.01,
        0.012,
        64,
        StepBreakdown(0.06, 0.12, 0.02, 0.6, 0.1, 0.1),
        [OperatorCost("aten::_fused_adamw_", 2.0, 0.4, 3.0)],
        "cpu",
    )
    message = "20% compute (6% forward, 12% backward, 2% optimizer), 60% communication"
    assert tables.verdict(profile).startswith(f"A step takes 10 ms (6,400 samples/s): {message}")
    assert "The limit is communication, so send less" in tables.verdict(profile)
    assert tables.costs(profile)[1] == [["aten::_fused_adamw_", "2", "40%", "3"]]
    page = html_page.from_markdown(tables.costs_in_markdown(profile))
    assert "<code>aten::_fused_adamw_</code>" in page

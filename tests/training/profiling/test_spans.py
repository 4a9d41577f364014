"""Stretches of time, and where a step's time goes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankzero.training.profiling.profiler import DATA, FORWARD, TraceEvent, _external_id, attributed
from rankzero.training.profiling.spans import (
    ActivitySpans,
    Span,
    breakdown,
    common,
    length,
    union,
    without,
)

MOMENT = st.integers(0, 50).map(float)
SPANS = st.lists(st.tuples(MOMENT, MOMENT).map(lambda pair: (min(pair), max(pair))), max_size=8)


def seconds(spans: list[Span]) -> set[int]:
    """Return the whole seconds that are covered: the slow way."""
    return {second for begin, end in spans for second in range(int(begin), int(end))}


@given(SPANS, SPANS)
def test_unions_and_what_two_have_in_common(one: list[Span], other: list[Span]) -> None:
    joined, shared = union(one), common(union(one), union(other))
    assert seconds(joined) == seconds(one) and length(joined) == len(seconds(one))
    assert length(shared) == len(seconds(one) & seconds(other))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(joined))


@given(SPANS, SPANS)
def test_what_one_has_and_the_other_has_not(one: list[Span], other: list[Span]) -> None:
    rest = without(union(one), union(other))
    assert seconds(rest) == seconds(one) - seconds(other) and length(rest) == len(seconds(rest))


@given(st.floats(1, 100), st.floats(0, 100), SPANS, SPANS, SPANS, SPANS)
def test_the_parts_add_up(
    wall: float,
    waited: float,
    forward: list[Span],
    backward: list[Span],
    optimizer: list[Span],
    sent: list[Span],
) -> None:
    found = breakdown(wall, waited, ActivitySpans(forward, backward, optimizer, communicating=sent))
    parts = dataclasses.astuple(found)
    assert sum(parts) == pytest.approx(1) and min(parts) >= 0 and getattr(found, found.bound) > 0


def test_communication_counts_where_nothing_is_computed() -> None:
    seen = ActivitySpans([(0, 3), (2, 3.5)], [(3, 4)], [(4, 4.5)], [(4.5, 5)], [(4, 8)])
    found = breakdown(10.0, 1.0, seen)
    assert dataclasses.astuple(found) == pytest.approx((0.3, 0.1, 0.05, 0.3, 0.1, 0.15))
    assert found.compute == pytest.approx(0.45) and found.bound == "compute"


def test_operators_on_the_cpu_belong_to_the_range_they_are_in() -> None:
    events = [
        TraceEvent(DATA, 0, 1),
        TraceEvent("aten::index_select", 0.2, 0.9),
        TraceEvent(FORWARD, 1, 3),
        TraceEvent("aten::linear", 1, 2.5),
        TraceEvent("aten::addmm", 1.5, 2),
        TraceEvent("autograd::engine::evaluate_function: AddmmBackward0", 3, 5),
        TraceEvent("aten::mm", 3.5, 4.5),
        TraceEvent("aten::clip", 5, 6),
        TraceEvent("Optimizer.step#AdamW.step", 6, 8),
        TraceEvent("aten::add_", 6, 7),
        TraceEvent("gloo:all_reduce", 4, 6.5),
        TraceEvent("something", 8, 9),
    ]
    seen = attributed(events, on_gpu=False)
    assert seen == ActivitySpans([(1, 2.5)], [(3.5, 4.5)], [(6, 7)], [(5, 6)], [(4, 6.5)])


def test_kernels_belong_to_the_range_they_were_launched_in() -> None:
    events = [
        operator(FORWARD, 0, 1, 1),
        operator("aten::mm", 0.5, 0.6, 2),
        operator("autograd::engine::evaluate_function: MmBackward0", 1, 2, 3),
        operator("aten::mm", 1.1, 1.2, 4),
        operator("Optimizer.step#SGD.step", 2, 3, 5),
        operator("aten::add_", 2.5, 2.6, 6),
        TraceEvent(FORWARD, 10, 14, on_gpu=True),
        TraceEvent("gemm", 10, 12, True, 20, 2),
        TraceEvent("gemm", 12, 13, True, 21, 4),
        TraceEvent("elementwise", 13, 14, True, 22, 6),
        TraceEvent("Memset", 14, 15, True, 23),
        TraceEvent("ncclDevKernel_AllReduce", 12, 16, True, 24, 3),
    ]
    calls = [  # CUPTI counts by itself: its numbers are those of operators, too
        TraceEvent("cudaLaunchKernel", 2.55, 2.56, number=2, launched_by=6),
        TraceEvent("cudaDeviceSynchronize", 2.9, 2.95, number=4),
        TraceEvent("cudaMemsetAsync", 0.1, 0.2, number=6),
    ]
    for some in (events, [*events, *calls], [*calls, *events]):
        assert attributed(some, on_gpu=True) == ActivitySpans(
            [(10, 12)], [(12, 13)], [(13, 14)], [(14, 15)], [(12, 16)]
        )


def operator(name: str, begin: float, end: float, number: int) -> TraceEvent:
    return TraceEvent(name, begin, end, number=number, external_id=number)


def test_operators_and_ranges_of_the_installed_profiler_are_told_as_such() -> None:
    cpu = torch.profiler.ProfilerActivity.CPU
    with (
        torch.profiler.profile(activities=[cpu]) as profiler,
        torch.profiler.record_function(FORWARD),
    ):
        torch.ones(2, 2) @ torch.ones(2, 2)
    recorded = [TraceEvent.of(event) for event in profiler.profiler.kineto_results.events()]
    assert {FORWARD, "aten::mm"} <= {event.name for event in recorded if event.is_operator}


class OfAnOlderTorch:
    """An event of a profiler that does not tell `external_id`."""

    def __init__(self, name: str) -> None:
        self.name = lambda: name

    def correlation_id(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("name", "number"), [("cudaLaunchKernel", 0), ("cuLaunchKernelEx", 0), ("custom", 7)]
)
def test_an_older_profiler_tells_cudas_calls_by_their_names(name: str, number: int) -> None:
    assert _external_id(OfAnOlderTorch(name)) == number


def test_a_stage_whose_measure_computes_nothing_has_a_forward_all_the_same() -> None:
    events = [
        TraceEvent("aten::mm", 0, 1),
        TraceEvent("Optimizer.step#SGD.step", 2, 3),
        TraceEvent("aten::add_", 2, 3),
    ]
    assert attributed(events, on_gpu=False) == ActivitySpans([(0, 1)], [], [(2, 3)], [], [])

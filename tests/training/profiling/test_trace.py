"""Operators and kernels of a trace are assigned to the parts of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankzero.training.profiling.spans import ActivitySpans
from rankzero.training.profiling.trace import DATA, FORWARD, TraceEvent, attributed, recorded_events


def test_cpu_operators_belong_to_the_range_around_them() -> None:
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


def test_kernels_belong_to_the_range_of_their_launch() -> None:
    events = [
        operator(FORWARD, 0, 1, 1),
        operator("aten::mm", 0.5, 0.6, 2),
        operator("autograd::engine::evaluate_function: MmBackward0", 1, 2, 3),
        operator("aten::mm", 1.1, 1.2, 4),
        operator("Optimizer.step#SGD.step", 2, 3, 5),
        operator("aten::add_", 2.5, 2.6, 6),
        TraceEvent("gemm", 10, 12, True, 20, 2),
        TraceEvent("gemm", 12, 13, True, 21, 4),
        TraceEvent("elementwise", 13, 14, True, 22, 6),
        TraceEvent("Memset", 14, 15, True, 23),
        TraceEvent("ncclDevKernel_AllReduce", 12, 16, True, 24, 3),
    ]
    # CUPTI numbers its own events, and operators have the same numbers.
    calls = [
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


def test_the_installed_profiler_has_operators_and_ranges() -> None:
    """`recorded_events` uses a private attribute of torch.profiler, and fails if it goes."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with (
        torch.profiler.profile(activities=[cpu]) as profiler,
        torch.profiler.record_function(FORWARD),
    ):
        torch.ones(2, 2) @ torch.ones(2, 2)
    found = {event.name for event in recorded_events(profiler) if event.is_operator}
    assert {FORWARD, "aten::mm"} <= found


def profiled(name: str, device: str, **more: Any) -> SimpleNamespace:
    seen = {"name": name, "start_ns": 0, "duration_ns": 1, "device_type": device}
    numbers = {"correlation_id": 7, "linked_correlation_id": 0}
    values = {**seen, **numbers, **more}
    return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})


def recorded(*events: SimpleNamespace) -> list[TraceEvent]:
    results = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    return recorded_events(SimpleNamespace(profiler=results))


def test_a_range_that_the_profiler_repeats_among_the_kernels_is_left_out() -> None:
    """It spans an all-gather, which would count as computing."""
    kernel = profiled("ncclDevKernel_AllGather", "CUDA", is_user_annotation=False)
    again = profiled("FSDP::all_gather (0)", "CUDA", is_user_annotation=True)
    assert [event.name for event in recorded(kernel, again)] == ["ncclDevKernel_AllGather"]


@pytest.mark.parametrize(
    ("name", "number"), [("cudaLaunchKernel", 0), ("cuLaunchKernelEx", 0), ("custom", 7)]
)
def test_an_older_profiler_shows_cuda_calls_by_their_names(name: str, number: int) -> None:
    (found,) = recorded(profiled(name, "CPU"))
    assert found.external_id == number


def test_the_forward_of_a_pipeline_stage_is_outside_of_measure() -> None:
    events = [
        TraceEvent("aten::mm", 0, 1),
        TraceEvent("Optimizer.step#SGD.step", 2, 3),
        TraceEvent("aten::add_", 2, 3),
    ]
    assert attributed(events, on_gpu=False) == ActivitySpans([(0, 1)], [], [(2, 3)], [], [])

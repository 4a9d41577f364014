"""Assigns a step's operators and kernels: to the forward, the backward or the optimizer."""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rankzero.training.profiling.spans import ActivitySpans, Span, union

FORWARD, DATA = "rankzero::forward", "rankzero::data"
"""Ranges that `profiler` marks."""
_BACKWARD, _OPTIMIZER = "autograd::engine::evaluate_function", "Optimizer."
"""Ranges that PyTorch marks."""
_COMMUNICATION = ("nccl", "gloo:", "c10d::")
_RUNTIME_CALL = re.compile(r"(cuda|cu|hip)[A-Z]")
"""Calls such as cudaLaunchKernel and cuLaunchKernel, as CUPTI records them."""


@dataclasses.dataclass(frozen=True)
class TraceEvent:
    """An operator, a range or a kernel. Times are in seconds."""

    name: str
    begin: float
    end: float
    on_gpu: bool = False
    number: int = 0
    launched_by: int = 0
    """The number of the operator that launched a kernel, or 0 if it is unknown."""
    external_id: int = 0
    """PyTorch's number of an operator or range. 0 for what CUPTI numbers, such as CUDA's calls."""

    @property
    def is_operator(self) -> bool:
        """Return whether `number` is PyTorch's. CUPTI uses the same numbers for other events."""
        return not self.on_gpu and self.external_id != 0 and self.launched_by == 0

    @property
    def span(self) -> Span:
        """Return begin and end."""
        return self.begin, self.end

    @property
    def communicates(self) -> bool:
        """Return whether it is a collective or a part of one."""
        return self.name.lower().startswith(_COMMUNICATION)


def recorded_events(profiler: Any) -> list[TraceEvent]:
    """Return the events of a `torch.profiler.profile` that has ended."""
    # `kineto_results` is private to torch. Only these events contain which operator launched a
    # kernel; `profiler.events()` does not. Seen in torch 2.15. If the name goes, the test
    # test_the_installed_profiler_has_operators_and_ranges fails.
    found = []
    for event in profiler.profiler.kineto_results.events():
        begin = event.start_ns() / 1e9
        end = begin + event.duration_ns() / 1e9
        on_gpu = str(event.device_type()).endswith("CUDA")
        if on_gpu and event.is_user_annotation():
            continue  # a range, listed again: it would hide the communication between its kernels
        number, launched_by = event.correlation_id(), event.linked_correlation_id()
        if hasattr(event, "external_id"):
            external_id = int(event.external_id())
        else:  # an older torch: only the name shows which events are CUDA's calls
            external_id = 0 if _RUNTIME_CALL.match(event.name()) else int(number)
        found.append(TraceEvent(event.name(), begin, end, on_gpu, number, launched_by, external_id))
    return found


def attributed(events: Sequence[TraceEvent], on_gpu: bool) -> ActivitySpans:
    """Return when something was computed, for what, and when something was communicated. Pure.

    On a GPU, a kernel belongs to the range in which the operator that launched it began. On the
    CPU, an operator belongs to the range in which it began; gloo's threads communicate.
    """
    host = [event for event in events if not event.on_gpu]
    ranges = {
        prefix: union(event.span for event in host if event.name.startswith(prefix))
        for prefix in (FORWARD, _BACKWARD, _OPTIMIZER, DATA)
    }
    mine = [event for event in events if event.on_gpu] if on_gpu else host
    communicating = [event.span for event in mine if event.communicates]
    work = [event for event in mine if not event.communicates]
    if on_gpu:
        begun = {event.number: event.begin for event in host if event.is_operator}
        placed = [
            (event.span, begun.get(event.launched_by) if event.launched_by else None)
            for event in work
        ]
    else:
        placed = [(event.span, event.begin) for event in work if event.name.startswith("aten::")]
    parts = _parts(placed, ranges)
    forward, unknown = parts[FORWARD], parts[""]
    # On a pipeline's stages, `measure` computes nothing: the forward is outside of its range.
    if not forward:
        forward, unknown = unknown, []
    return ActivitySpans(forward, parts[_BACKWARD], parts[_OPTIMIZER], unknown, communicating)


def _parts(
    placed: Iterable[tuple[Span, float | None]], ranges: Mapping[str, Sequence[Span]]
) -> dict[str, list[Span]]:
    """Divide spans among the ranges that their moments are in, or "" if it is in none or unknown.

    The computation of a batch is in the range `DATA`: it is counted as waiting for data.
    """
    # The first that fits counts: a forward that is repeated inside the backward belongs to that.
    order = (_OPTIMIZER, _BACKWARD, FORWARD, DATA)
    parts: dict[str, list[Span]] = {name: [] for name in (*order, "")}
    for span, moment in placed:
        inside = (name for name in order if moment is not None and _covers(ranges[name], moment))
        parts[next(inside, "")].append(span)
    return {name: union(spans) for name, spans in parts.items()}


def _covers(spans: Sequence[Span], moment: float) -> bool:
    place = bisect.bisect_right(spans, (moment, math.inf))
    return place > 0 and moment < spans[place - 1][1]

"""Unions and differences of spans, and the parts of a step's time."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.training.profiling.spans import (
    ActivitySpans,
    Span,
    breakdown,
    length,
    union,
    without,
)

MOMENT = st.integers(0, 50).map(float)
SPANS = st.lists(st.tuples(MOMENT, MOMENT).map(lambda pair: (min(pair), max(pair))), max_size=8)


def seconds(spans: list[Span]) -> set[int]:
    """Return the whole seconds that are covered: the slow way."""
    return {second for begin, end in spans for second in range(int(begin), int(end))}


@given(SPANS)
def test_union(one: list[Span]) -> None:
    joined = union(one)
    assert seconds(joined) == seconds(one) and length(joined) == len(seconds(one))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(joined))


@given(SPANS, SPANS)
def test_difference(one: list[Span], other: list[Span]) -> None:
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

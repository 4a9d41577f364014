"""Stretches of time, and where a step's time goes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.train.spans import Span, breakdown, common, length, union

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


@given(st.floats(1, 100), st.floats(0, 100), SPANS, SPANS)
def test_the_parts_add_up(wall: float, waited: float, computing: list[Span], communicating: list[Span]) -> None:
    found = breakdown(wall, waited, computing, communicating)
    parts = dataclasses.astuple(found)
    assert sum(parts) == pytest.approx(1) and min(parts) >= 0 and found.bound in dataclasses.asdict(found)


def test_communication_counts_where_nothing_is_computed() -> None:
    found = breakdown(10.0, 1.0, [(0, 4), (3, 5)], [(4, 8)])
    assert (found.compute, found.communication, found.data, found.other) == pytest.approx((0.5, 0.3, 0.1, 0.1))
    assert found.bound == "compute"

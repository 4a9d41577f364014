"""Stretches of time: their union, what two have in common. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

Span = tuple[float, float]
"""Begin and end, begin < end."""


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same time in stretches that do not touch, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif begin < end:
            found.append((begin, end))
    return found


def length(spans: Sequence[Span]) -> float:
    """Return how long stretches that do not touch are together."""
    return sum(end - begin for begin, end in spans)


def common(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Return the time that is in both; each in order, not touching."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Where the time of a step goes: fractions of it, adding up to 1."""

    compute: float
    communication: float
    """What is exposed: nothing is computed meanwhile."""
    data: float
    """Waiting for the next batch."""
    other: float
    """None of these: Python, launching kernels, waiting for the slowest rank."""

    @property
    def bound(self) -> str:
        """Return what limits the speed."""
        shares = dataclasses.asdict(self)
        return max(shares, key=lambda name: shares[name])


def breakdown(wall: float, waited: float, computing: Iterable[Span], communicating: Iterable[Span]) -> Breakdown:
    """Return where `wall` seconds went, of which `waited` for data; the spans are in seconds."""
    busy, talking = union(computing), union(communicating)
    exposed = length(talking) - length(common(busy, talking))
    compute, communication, data = (max(0.0, part) / wall for part in (length(busy), exposed, waited))
    rest = 1 - compute - communication - data
    if rest >= 0:
        return Breakdown(compute, communication, data, rest)
    whole = compute + communication + data  # threads beside the main one make more of it than there is
    return Breakdown(compute / whole, communication / whole, data / whole, 0.0)

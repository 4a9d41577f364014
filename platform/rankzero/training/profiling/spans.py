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


def without(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Return the time that is in `one` and not in `other`; each in order, not touching."""
    found, first = [], 0
    for begin, end in one:
        while first < len(other) and other[first][1] <= begin:
            first += 1
        number = first
        while number < len(other) and other[number][0] < end:
            if begin < other[number][0]:
                found.append((begin, other[number][0]))
            begin = max(begin, other[number][1])
            number += 1
        if begin < end:
            found.append((begin, end))
    return found


@dataclasses.dataclass(frozen=True)
class StepBreakdown:
    """Where the time of a step goes: fractions of it, adding up to 1."""

    forward: float
    """Computing what `measure` asks for."""
    backward: float
    optimizer: float
    communication: float
    """What is exposed: nothing is computed meanwhile."""
    data: float
    """Waiting for the next batch."""
    other: float
    """None of these: Python, launching kernels, clipping, waiting for the slowest rank."""

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.optimizer

    @property
    def bound(self) -> str:
        """Return what limits the speed: compute, communication, data or other."""
        shares = {
            name: getattr(self, name) for name in ("compute", "communication", "data", "other")
        }
        return max(shares, key=lambda name: shares[name])


@dataclasses.dataclass(frozen=True)
class ActivitySpans:
    """What was computed and sent in a stretch of time, in seconds since whenever; parts may overlap."""

    forward: Sequence[Span] = ()
    backward: Sequence[Span] = ()
    optimizer: Sequence[Span] = ()
    unknown: Sequence[Span] = ()
    """Computed, but nobody knows for what."""
    communicating: Sequence[Span] = ()


def breakdown(wall: float, waited: float, seen: ActivitySpans) -> StepBreakdown:
    """Return where `wall` seconds went, of which `waited` for data.

    Time in which several parts are computed at once counts once: for the optimizer, else the backward.
    """
    optimizer, backward, forward = union(seen.optimizer), union(seen.backward), union(seen.forward)
    busy = union([*optimizer, *backward, *forward, *seen.unknown])
    talking = union(seen.communicating)
    seconds = {
        "forward": length(without(without(forward, optimizer), backward)),
        "backward": length(without(backward, optimizer)),
        "optimizer": length(optimizer),
        "communication": length(talking) - length(common(busy, talking)),
        "data": waited,
    }
    shares = {name: max(0.0, part) / wall for name, part in seconds.items()}
    whole = max(
        1.0, sum(shares.values())
    )  # threads beside the main one make more of it than there is
    parts = {name: share / whole for name, share in shares.items()}
    return StepBreakdown(**parts, other=max(0.0, 1 - sum(parts.values())))

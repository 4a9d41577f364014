"""Spans of time: unions, differences, and how a step's time divides into parts. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

Span = tuple[float, float]
"""Begin and end, begin < end."""


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the time that any of the spans covers, as sorted spans that do not touch."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif begin < end:
            found.append((begin, end))
    return found


def length(spans: Sequence[Span]) -> float:
    """Return the total length of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def without(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Return the time that is in the union `one` and not in the union `other`."""
    # At each moment: 1 if it is in `one`, minus 1 if it is in `other`.
    changes = [change for begin, end in one for change in ((begin, 1), (end, -1))]
    changes += [change for begin, end in other for change in ((begin, -1), (end, 1))]
    found, total = list[Span](), 0
    for (time, change), (until, _) in itertools.pairwise(sorted(changes)):
        total += change
        if total == 1:
            found.append((time, until))
    return union(found)


@dataclasses.dataclass(frozen=True)
class StepBreakdown:
    """The parts of a step's time: fractions that add up to 1."""

    forward: float
    """Computing what `measure` asks for."""
    backward: float
    optimizer: float
    communication: float
    """Only what is exposed: nothing is computed at the same time."""
    data: float
    """Waiting for the next batch."""
    other: float
    """The rest: Python, launching kernels, clipping, waiting for the slowest rank."""

    @property
    def compute(self) -> float:
        """Return the fraction of forward, backward and optimizer."""
        return self.forward + self.backward + self.optimizer

    @property
    def bound(self) -> str:
        """Return the largest part: compute, communication, data or other."""
        names = ("compute", "communication", "data", "other")
        return max(names, key=lambda name: float(getattr(self, name)))


@dataclasses.dataclass(frozen=True)
class ActivitySpans:
    """When something was computed and communicated, in seconds. Spans may overlap."""

    forward: Sequence[Span] = ()
    backward: Sequence[Span] = ()
    optimizer: Sequence[Span] = ()
    unknown: Sequence[Span] = ()
    """Computed for an unknown part."""
    communicating: Sequence[Span] = ()


def breakdown(wall: float, waited: float, seen: ActivitySpans) -> StepBreakdown:
    """Return where `wall` seconds went, of which `waited` for data.

    Time in which several parts are computed counts once: for the optimizer, else the backward.
    """
    optimizer, backward, forward = union(seen.optimizer), union(seen.backward), union(seen.forward)
    busy = union([*optimizer, *backward, *forward, *seen.unknown])
    seconds = {
        "forward": length(without(without(forward, optimizer), backward)),
        "backward": length(without(backward, optimizer)),
        "optimizer": length(optimizer),
        "communication": length(without(union(seen.communicating), busy)),
        "data": waited,
    }
    shares = {name: max(0.0, part) / wall for name, part in seconds.items()}
    # Other threads may work while the main one waits for data, so the sum may exceed the time.
    total = max(1.0, sum(shares.values()))
    parts = {name: share / total for name, share in shares.items()}
    return StepBreakdown(**parts, other=max(0.0, 1 - sum(parts.values())))

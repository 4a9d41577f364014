"""Check the crash points of a recording."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from crash_points import disk, recovery, session
from crash_points.disk import Disk
from crash_points.record import Call, Kind, read_log
from crash_points.recovery import Oracle, Violation
from rankzero.run_store import checkpoint_files
from rankzero.run_store.folder import RunFolder
from support.memory_store import Change, MemoryStore, read_changes


@dataclasses.dataclass(frozen=True)
class Recording:
    """The recorded calls, and the undisturbed run."""

    calls: Sequence[Call]
    changes: Sequence[Change]
    oracle: Oracle


class Point(NamedTuple):
    """One crash: its number, how many calls came before, and what is left of them."""

    number: int
    calls: int
    variant: str
    content: disk.Content
    changes: int
    """How many changes MLflow has accepted."""


@dataclasses.dataclass
class Report:
    """The results of the crash points."""

    points: int = 0
    distinct: int = 0
    variants: Counter[str] = dataclasses.field(default_factory=Counter)
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[str] = dataclasses.field(default_factory=list)

    def text(self) -> str:
        kinds = Counter(line.split(": ")[1] for line in self.failures)
        return "\n".join(
            [
                f"crash points {self.points:,}, different states {self.distinct:,}",
                f"variants: {dict(self.variants)}",
                f"outcomes: {dict(self.outcomes)}; violations: {dict(kinds) or 'none'}",
                *self.failures,
            ]
        )


def read_recording(root: Path) -> Recording:
    """Return what was recorded below `root`. Raises AssertionError if calls are missing.

    That is the case if the calls do not lead to the files that are there.
    """
    model, states = Disk(), set()
    calls = [call for call in read_log(root) if not is_output(call.path)]
    for call in calls:
        model.apply(call)
        if call.kind is Kind.SYNC and call.path.endswith(checkpoint_files.STATE):
            states.add(recovery.checksum(model.now()[call.path] or b""))
    real = {path: data for path, data in disk.read_real(root).items() if not is_output(path)}
    differing = {path for path, _ in model.now().items() ^ real.items()}
    assert not differing, f"the model and the folder differ in {sorted(differing)}"
    folder = RunFolder(session.undisturbed(root) / "runs" / session.RUN)
    oracle = Oracle.of(folder, session.experiment().goal, frozenset(states))
    return Recording(calls, read_changes(root / session.STORE), oracle)


def is_output(path: str) -> bool:
    """Return whether this is output of a process, on which no promise rests."""
    return path.endswith(".log") or "logs" in path.split("/")


def points(recording: Recording, cuts: int, seed: int = 0) -> Iterator[Point]:
    """Yield every crash point of the recording."""
    model, chance, number, changes = Disk(), random.Random(seed), itertools.count(), 0
    for index, call in enumerate(recording.calls, 1):
        if call.path == session.STORE:
            changes += call.kind is Kind.WRITE
        else:
            model.apply(call)
        for variant, content in model.states(cuts, chance):
            yield Point(next(number), index, variant, content, changes)


class Checker:
    """Checks crash points, each different state once."""

    def __init__(self, recording: Recording, folder: Path) -> None:
        self._recording, self._root = recording, folder / "crashed"
        self._seen: set[int] = set()
        self._stores: dict[int, bytes] = {}
        self.report = Report()

    def check(self, point: Point) -> None:
        """Recover from one crash, and add the result to the report."""
        report = self.report
        report.points += 1
        report.variants[kind_of(point.variant)] += 1
        state = hash((frozenset(point.content.items()), point.changes))
        if state in self._seen:
            return
        self._seen.add(state)
        report.distinct += 1
        disk.write_real(point.content, self._root)
        try:
            how = recovery.check(self._root, self._store(point.changes), self._recording.oracle)
        except Violation as violation:
            how = str(violation).split(":", maxsplit=1)[0]
            call = self._recording.calls[point.calls - 1]
            report.failures.append(
                f"{point.number} after call {point.calls} ({call}), {point.variant}: {violation}"
            )
        report.outcomes[how] += 1
        shutil.rmtree(self._root)

    def _store(self, changes: int) -> MemoryStore:
        """Return MLflow as it is after this many changes."""
        if changes not in self._stores:
            store = MemoryStore()
            store.replay(self._recording.changes[:changes])
            self._stores[changes] = pickle.dumps(vars(store) | {"models": None})
        made = MemoryStore()
        vars(made).update(pickle.loads(self._stores[changes]) | {"models": made})
        return made


def check(
    recording: Recording, folder: Path, cuts: int, most: int | None = None, only: int | None = None
) -> Checker:
    """Check all crash points, or about `most` of them, or the one of number `only`."""
    checker, found = Checker(recording, folder), list(points(recording, cuts))
    distance = 1 if most is None else max(1, len(found) // most)
    for point in found[::distance] if only is None else found[only : only + 1]:
        checker.check(point)
    return checker


def kind_of(variant: str) -> str:
    """Return a variant without its path and place."""
    names, _, data = variant.partition(", ")
    for kind in ("torn", "zeros"):
        if f" {kind} at " in data:
            return f"{names}, {kind}"
    return f"{names}, data of one file lost" if data.startswith("data of") else variant

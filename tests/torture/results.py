"""What a campaign came to: its results, in a table, in a line, and as it is kept."""

from __future__ import annotations

import collections
import dataclasses
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torture.fuzzing import Fuzzed

PROMISES = ("lost", "corrupt", "wrong", "wrong status", "hang", "orphan")
"""What a broken promise is called: the first word of what `Broken` says."""
HERE = Path(__file__).parent
FOLDERS = re.compile(r"(?:(?<![\w.:/])|(?<=sqlite:///))/(?:[^\s/'\"]+/)+")
"""What stands before the last name of an absolute path."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one scenario came to."""

    scenario: str
    seed: int
    faults: list[str]
    seconds: float
    broken: str | None
    """The promise that did not hold."""
    not_run: str | None = None
    """Why this machine does not allow it."""
    unchecked: list[str] = dataclasses.field(default_factory=list)
    """What was not looked at."""
    idling: float = 0.0
    """The longest that processes with nothing to deliver took to leave after their command, in seconds."""
    leaving: float = 0.0
    """The longest that any took."""


def summary(results: Sequence[Result]) -> str:
    """Return the campaign in a table: by scenario, faults tried and what broke."""
    lines = [f"{'scenario':<22}{'times':>6}{'faults':>8}{'broken':>8}"]
    for name in dict.fromkeys(result.scenario for result in results):
        mine = [result for result in results if result.scenario == name]
        faults, broken = (
            sum(len(one.faults) for one in mine),
            sum(one.broken is not None for one in mine),
        )
        lines.append(f"{name:<22}{len(mine):>6}{faults:>8}{broken:>8}")
    return "\n".join([*lines, _left(results), *omitted(results), verdict(results)])


def _left(results: Sequence[Result]) -> str:
    idling, leaving = (f"{seconds:.0f} s" for seconds in longest(results).values())
    return (
        f"after a command its processes left within {idling}, those that deliver within {leaving}"
    )


def omitted(results: Sequence[Result]) -> list[str]:
    """Return what was not tried or not looked at, in a line each: no fault is claimed to have been survived there."""
    told = [f"not run: {result.scenario}: {result.not_run}" for result in results if result.not_run]
    told += [what for result in results for what in result.unchecked]
    return [
        f"{what} ({times} of {len(results)} scenarios)"
        for what, times in collections.Counter(told).items()
    ]


def longest(results: Sequence[Result]) -> dict[str, float]:
    """Return the longest that processes took to leave, those with nothing to deliver and all of them."""
    took = [(result.idling, result.leaving) for result in results] or [(0.0, 0.0)]
    idling, leaving = (round(max(seconds), 1) for seconds in zip(*took, strict=True))
    return {"idling": idling, "leaving": leaving}


def verdict(results: Sequence[Result]) -> str:
    """Return the campaign in a line. A fault has survived where its scenario broke no promise."""
    faults = [fault for result in results for fault in result.faults]
    survived = sum(len(result.faults) for result in results if result.broken is None)
    broken = collections.Counter(
        result.broken.partition(":")[0] for result in results if result.broken
    )
    told = ", ".join(f"{kind} {broken.pop(kind, 0)}" for kind in PROMISES)
    other = f", other {broken.total()}" if broken else ""
    return f"faults tried {len(faults)} over {len(set(faults))} kinds; survived {survived}; {told}{other}"


def report(results: Sequence[Result], seed: int, fuzzed: Fuzzed | None = None) -> dict[str, Any]:
    """Return what is kept of a campaign."""
    return {
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        **commit(),
        "machine": f"{platform.system()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "verdict": verdict(results),
        "omitted": [without_folders(told) for told in omitted(results)],
        "longest_seconds": longest(results),
        "fuzz": fuzzed and fuzzed.line,
        "faults": sum(len(result.faults) for result in results),
        "by_fault": dict(
            collections.Counter(
                fault for result in results for fault in result.faults
            ).most_common()
        ),
        "scenarios": [
            {
                **dataclasses.asdict(result),
                "broken": result.broken and without_folders(result.broken),
            }
            for result in results
        ],
    }


def without_folders(text: str) -> str:
    """Return the text with the last name of every path alone: a report is read where nobody knows the machine."""
    return FOLDERS.sub("", text)


def commit() -> dict[str, object]:
    """Return which commit is tried, and whether anything of it is changed."""
    return {
        "commit": _git("rev-parse", "HEAD") or None,
        "dirty": bool(_git("status", "--porcelain")),
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip()

"""The results of a campaign: as a table, as a line, and as a JSON report."""

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

# Kinds of broken promises. The message of `Broken` begins with its kind.
PROMISES = ("lost", "doubled", "corrupt", "wrong", "wrong status", "hang", "orphan")
HERE = Path(__file__).parent
# All of an absolute path except for its last name.
FOLDERS = re.compile(r"(?:(?<![\w.:/])|(?<=sqlite:///))/(?:[^\s/'\"]+/)+")


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one scenario."""

    scenario: str
    seed: int
    faults: list[str]
    seconds: float
    broken: str | None
    """The promise that did not hold, or None."""
    not_run: str | None = None
    """Why this machine does not allow the scenario, or None."""
    unchecked: list[str] = dataclasses.field(default_factory=list)
    """Checks that this machine does not allow."""
    idling: float = 0.0
    """Most seconds that a process with nothing to deliver ran after its command had ended."""
    leaving: float = 0.0
    """The same for any process."""


def summary(results: Sequence[Result]) -> str:
    """Return a table of the campaign: by scenario, how often it ran, its faults, and what broke."""
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
        f"after a command its processes ended within {idling}, those that deliver within {leaving}"
    )


def omitted(results: Sequence[Result]) -> list[str]:
    """Return a line for each scenario that did not run and each check that was left out."""
    found = [
        f"not run: {result.scenario}: {result.not_run}" for result in results if result.not_run
    ]
    found += [check for result in results for check in result.unchecked]
    return [
        f"{line} ({times} of {len(results)} scenarios)"
        for line, times in collections.Counter(found).items()
    ]


def longest(results: Sequence[Result]) -> dict[str, float]:
    """Return most seconds until processes ended: those with nothing to deliver, and all."""
    took = [(result.idling, result.leaving) for result in results] or [(0.0, 0.0)]
    idling, leaving = (round(max(seconds), 1) for seconds in zip(*took, strict=True))
    return {"idling": idling, "leaving": leaving}


def verdict(results: Sequence[Result]) -> str:
    """Return the campaign in a line. A fault is survived if its scenario broke no promise."""
    faults = [fault for result in results for fault in result.faults]
    survived = sum(len(result.faults) for result in results if result.broken is None)
    broken = collections.Counter(
        result.broken.partition(":")[0] for result in results if result.broken
    )
    kinds = ", ".join(f"{kind} {broken.pop(kind, 0)}" for kind in PROMISES)
    other = f", other {broken.total()}" if broken else ""
    tried = f"faults tried {len(faults)} over {len(set(faults))} kinds"
    return f"{tried}; survived {survived}; {kinds}{other}"


def report(results: Sequence[Result], seed: int, fuzzed: Fuzzed | None = None) -> dict[str, Any]:
    """Return the JSON report of a campaign."""
    return {
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        **commit(),
        "machine": f"{platform.system()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "verdict": verdict(results),
        "omitted": [without_folders(line) for line in omitted(results)],
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
    """Return the text with only the last name of every path. A report names no folder of a user."""
    return FOLDERS.sub("", text)


def commit() -> dict[str, object]:
    """Return the commit under test, and whether the working tree differs from it."""
    return {
        "commit": _git("rev-parse", "HEAD") or None,
        "dirty": bool(_git("status", "--porcelain")),
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip()

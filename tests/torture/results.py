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


def summary(results: Sequence[Result]) -> str:
    """Return the campaign in a table: by scenario, faults tried and what broke."""
    lines = [f"{'scenario':<22}{'times':>6}{'faults':>8}{'broken':>8}"]
    for name in dict.fromkeys(result.scenario for result in results):
        mine = [result for result in results if result.scenario == name]
        faults, broken = sum(len(one.faults) for one in mine), sum(one.broken is not None for one in mine)
        lines.append(f"{name:<22}{len(mine):>6}{faults:>8}{broken:>8}")
    return "\n".join([*lines, verdict(results)])


def verdict(results: Sequence[Result]) -> str:
    """Return the campaign in a line. A fault has survived where its scenario broke no promise."""
    faults = [fault for result in results for fault in result.faults]
    survived = sum(len(result.faults) for result in results if result.broken is None)
    broken = collections.Counter(result.broken.partition(":")[0] for result in results if result.broken)
    told = ", ".join(f"{kind} {broken.pop(kind, 0)}" for kind in PROMISES)
    other = f", other {broken.total()}" if broken else ""
    return f"faults tried {len(faults)} over {len(set(faults))} kinds; survived {survived}; {told}{other}"


def report(results: Sequence[Result], seed: int, fuzzed: Fuzzed | None = None) -> dict[str, object]:
    """Return what is kept of a campaign."""
    return {
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        **commit(),
        "machine": f"{platform.system()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "verdict": verdict(results),
        "fuzz": fuzzed and fuzzed.line,
        "faults": sum(len(result.faults) for result in results),
        "by_fault": dict(collections.Counter(fault for result in results for fault in result.faults).most_common()),
        "scenarios": [
            {**dataclasses.asdict(result), "broken": result.broken and without_folders(result.broken)}
            for result in results
        ],
    }


def without_folders(text: str) -> str:
    """Return the text with the last name of every path alone: a report is read where nobody knows the machine."""
    return FOLDERS.sub("", text)


def commit() -> dict[str, object]:
    """Return which commit is tried, and whether anything of it is changed."""
    return {"commit": _git("rev-parse", "HEAD") or None, "dirty": bool(_git("status", "--porcelain"))}


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip()

"""Run the fuzz tests, and count the cases and the failures. `make fuzz` runs more cases."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FUZZ = (
    "config/test_config_fuzz.py",
    "run_store/test_hostile_journals.py",
    "run_store/test_planted.py",
    "tracking/test_hostile_values.py",
)


@dataclasses.dataclass(frozen=True)
class Fuzzed:
    """The result of the fuzz tests. `output` is pytest's."""

    cases: int
    failed: int
    passed: bool
    output: str

    @property
    def line(self) -> str:
        """The result in one line."""
        return f"fuzz cases tried {self.cases:,}; failed {self.failed}"


def fuzz(cases: int) -> Fuzzed:
    """Run the fuzz tests with this many cases each. Slow tests use fewer."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-show-statistics"]
    done = subprocess.run(
        [sys.executable, *words, *(str(TESTS / name) for name in FUZZ)],
        cwd=TESTS.parent,
        env={**os.environ, "RANKZERO_FUZZ_CASES": str(cases)},
        capture_output=True,
        text=True,
        check=False,
    )
    return counted(done.stdout + done.stderr, done.returncode == 0)


def counted(output: str, passed: bool) -> Fuzzed:
    """Return the cases that Hypothesis counts in `output`, without those that a test rejected."""
    counts = [
        (int(good), int(bad)) for good, bad in re.findall(r"(\d+) passing, (\d+) failing", output)
    ]
    return Fuzzed(sum(map(sum, counts)), sum(bad for _, bad in counts), passed, output)

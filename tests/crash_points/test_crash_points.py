"""About 5,000 crash points of a recorded training. `make torture` checks all of them.

The recording has three attempts of one run, and SIGKILL ends two of them. `disk.py` describes what
a crash may leave, `recovery.py` what must hold after it.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash_points import campaign, record
from crash_points.campaign import Recording
from crash_points.record import Kind

POINTS, CUTS = 5000, 3
pytestmark = pytest.mark.timeout(600)  # a minute of one core, which others share
ERRORS = "0.02"  # of a thousand


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder in memory, if there is one."""
    with tempfile.TemporaryDirectory(dir=record.memory_folder()) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def library(place: Path) -> Path:
    if record.COMPILER is None and "RANKZERO_CI" not in os.environ:
        pytest.skip("there is no C compiler")
    return record.compile_library(place)


@pytest.fixture(scope="module")
def recording(place: Path, library: Path) -> Recording:
    record.record_session(library, place / "session")
    return campaign.read_recording(place / "session")


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_at_any_crash_point(recording: Recording, place: Path) -> None:
    report = campaign.check(recording, place, CUTS, POINTS).report
    print(report.text())
    assert not report.failures, report.text()
    assert report.points >= POINTS
    assert report.outcomes.keys() >= {"resumed", "finished", "ended"}


@pytest.mark.parametrize("path", ["events.jsonl", "manifest.json", "checkpoints"])
def test_a_missing_sync_is_a_violation(recording: Recording, place: Path, path: str) -> None:
    calls = [
        call
        for call in recording.calls
        if not (call.kind is Kind.SYNC and call.path.endswith(path))
    ]
    without = dataclasses.replace(recording, calls=calls)
    report = campaign.check(without, place, cuts=0, most=200).report
    assert any(": lost: " in failure for failure in report.failures), report.text()


def test_an_error_at_any_call_loses_and_doubles_nothing(place: Path, library: Path) -> None:
    root = place / "errors"
    root.mkdir()
    command = [sys.executable, "-m", "crash_points.errors", str(root), ERRORS]
    environ = record.environment(library, root)
    done = subprocess.run(command, check=False, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

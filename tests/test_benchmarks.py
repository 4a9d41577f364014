"""The benchmarks' arithmetic, and the result files that they write."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from rankzero.events import StepsLogged
from rankzero.run_store.journal import Journal

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("harness")


def test_a_report_of_the_speed_is_no_step(harness: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    for end in range(10, 101, 10):
        times = [float(step) for step in range(end - 9, end + 1)]
        journal(StepsLogged(list(range(end - 9, end + 1)), times, {"train/loss": [1.0] * 10}))
        journal(StepsLogged([end], [float(end)], {"lr": [0.1]}))
    journal.close()
    assert harness.step_times(tmp_path / "events.jsonl") == [float(step) for step in range(1, 101)]

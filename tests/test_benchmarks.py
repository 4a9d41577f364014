"""The benchmarks' arithmetic, and the result files that they write."""

from __future__ import annotations

import argparse
import importlib
import sys
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


def test_a_short_try_does_not_replace_the_published_figures(harness: Any) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=2)
    for words, whole in (("", True), ("--jobs 1", True), ("--jobs 1 --rounds 1", False)):
        assert harness.is_whole(parser, parser.parse_args(words.split()), "jobs") == whole


def test_a_part_that_is_measured_alone_keeps_the_others(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = importlib.import_module("search_scale")
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(scale, "milliseconds", lambda *_: [1.0])
    harness.save("search_scale", milliseconds={"other": [2.0]})
    monkeypatch.setattr(sys, "argv", ["search_scale.py", "--only", "in memory"])
    scale.main()
    assert harness.known("search_scale")["milliseconds"] == {"other": [2.0], "in memory": [1.0]}


def test_a_report_of_the_speed_is_no_step(harness: Any, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    for end in range(10, 101, 10):
        times = [float(step) for step in range(end - 9, end + 1)]
        journal(StepsLogged(list(range(end - 9, end + 1)), times, {"train/loss": [1.0] * 10}))
        journal(StepsLogged([end], [float(end)], {"lr": [0.1]}))
    journal.close()
    assert harness.step_times(tmp_path / "events.jsonl") == [float(step) for step in range(1, 101)]

"""A run's progress as text."""

from __future__ import annotations

from pathlib import Path

from rankzero.catalog import summary
from rankzero.cli.commands.runs import _cells
from rankzero.experiment import Goal
from rankzero.reporting.progress_bar import ProgressModel
from support.runs import append, ended, evaluated, make_folder, started


def test_a_small_value_and_a_slow_run_are_not_shown_as_zero(tmp_path: Path) -> None:
    end = ended(metrics={"best": 3.2e-5, "samples_per_second": 0.38})
    append(folder := make_folder(tmp_path), started(), end)
    assert _cells(summary.read_summary(folder), "val/accuracy")[2:4] == ("3.2e-05", "0.38")
    model = ProgressModel(Goal("val/accuracy", "max"))
    assert dict(model.results(end)).items() >= {"samples/s": "0.38"}.items()
    assert "val/accuracy 3.2e-05  val/loss" in model.evaluation_line(evaluated(1, 3.2e-5))

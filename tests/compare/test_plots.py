"""The figures of comparisons and profiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from rankzero.compare import plots
from rankzero.compare.results import StrategyResult, StrategyRun, with_speed_ups
from rankzero.training.profiling.profiler import Profile
from rankzero.training.profiling.spans import StepBreakdown


@pytest.mark.parametrize("seconds", [0.001, 0.0])
def test_the_parts_of_a_step_are_drawn(tmp_path: Path, seconds: float) -> None:
    breakdown = StepBreakdown(0.3, 0.5, 0.1, 0.02, 0.0, 0.08)
    profile = Profile(seconds, seconds, 32, breakdown, [], "a device with a $ in its name")
    plots.write_step(tmp_path / "bar.png", profile)
    with Image.open(tmp_path / "bar.png") as image:
        assert image.width > 900


def test_the_ideal_begins_at_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = plots.canvas(7, 5)
    monkeypatch.setattr(plots, "canvas", lambda *_: figure)
    rows = [
        StrategyResult(StrategyRun("ddp", count), 1.0, 100.0 * count, reason=reason)
        for count, reason in ((1, "out of memory"), (2, ""), (8, ""))
    ]
    plots.write_scaling(tmp_path, with_speed_ups(rows))
    ideal, measured = (line.get_xydata().tolist() for line in figure.axes[0].lines)
    assert ideal == measured == [[2, 1], [8, 4]]
    (tmp_path / "scaling.png").unlink()
    plots.write_scaling(tmp_path, with_speed_ups(rows[:2]))
    assert not list(tmp_path.iterdir()), "points above each other"

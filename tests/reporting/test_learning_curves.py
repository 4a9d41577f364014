"""The learning curves that ``rankzero export`` draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankzero.events import StepsLogged
from rankzero.reporting import learning_curves, metric_table
from support.runs import T0, append, evaluated, make_folder, started, steps


def test_curves_of_a_metric_share_a_frame() -> None:
    names = ["train/loss", "lr", "val/loss", "val/accuracy", "train/accuracy"]
    assert learning_curves.grouped(names, "val/accuracy") == {
        "accuracy": ["val/accuracy", "train/accuracy"],
        "loss": ["train/loss", "val/loss"],
        "lr": ["lr"],
    }


def test_the_goal_and_the_loss_have_the_first_of_the_frames() -> None:
    names = [f"train/m{number}" for number in range(50)] + ["lr", "val/goal", "val/loss"]
    groups = list(learning_curves.grouped(names, "val/goal"))
    assert groups == ["goal", "loss", *(f"m{number}" for number in range(10))]


def test_a_run_without_metrics_has_no_curves(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert not learning_curves.write(tmp_path / "no.png", metric_table.metrics(folder))
    append(folder, started(), steps(1, 60), evaluated(60, 0.5))
    assert learning_curves.write(tmp_path / "curves.png", metric_table.metrics(folder))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["train/a$b{c$", "val/$\\\\frac$", "train/$$", "val/_x"])
def test_names_are_not_read_as_formulas(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), steps(1, 20), steps(1, 20, name))
    assert learning_curves.write(tmp_path / "curves.png", metric_table.metrics(folder))


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    folder, infinity = make_folder(tmp_path), float("inf")
    values = {"train/loss": [infinity, float("nan")], "val/x": [1e30, -infinity]}
    append(folder, started(), StepsLogged([1, 2], [T0, T0], values))
    assert learning_curves.write(tmp_path / "curves.png", metric_table.metrics(folder))


def test_metrics_called_step_and_time_are_columns_too(tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), StepsLogged([3], [T0], {"step": [1.0], "time": [2.0]}))
    table = metric_table.metrics(folder)
    assert [*table.columns] == ["step", "time", "step (metric)", "time (metric)"]
    assert [*table["step"], *table["time (metric)"]] == [3, 2.0]

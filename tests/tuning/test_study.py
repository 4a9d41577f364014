"""What a study draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankzero.search_ranges import Integer, Uniform
from rankzero.tuning.options import Sampler
from rankzero.tuning.study import _distribution, _grid_points, open_study


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_study_draws_with_any_seed_of_a_training(tmp_path: Path, sampler: Sampler) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    study = open_study(url, "s", sampler=sampler, pruner="none", seed=2**40 + 7)
    study.draw_from({"dropout": Uniform(0.0, 1.0)})
    first, second = study.ask(), study.ask()
    assert study.known[first].parameters != study.known[second].parameters


def test_a_grid_has_few_points_of_a_wide_range_of_integers() -> None:
    points = [_grid_points(_distribution(Integer(0, high))) for high in (99, 2000)]
    assert [len(points[0]), points[1]] == [100, [0, 500, 1000, 1500, 2000]]

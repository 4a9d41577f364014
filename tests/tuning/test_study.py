"""What a study draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankzero.search_ranges import Uniform
from rankzero.tuning.options import Sampler
from rankzero.tuning.study import open_study


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_study_draws_with_any_seed_of_a_training(tmp_path: Path, sampler: Sampler) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    study = open_study(url, "s", sampler=sampler, pruner="none", seed=2**40 + 7)
    study.draw_from({"dropout": Uniform(0.0, 1.0)})
    first, second = study.ask(), study.ask()
    assert study.known[first].parameters != study.known[second].parameters

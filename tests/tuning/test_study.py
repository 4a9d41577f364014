"""What a study draws."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from rankzero.search_ranges import Integer, Uniform
from rankzero.tuning.objective import MEMORY, QUALITY
from rankzero.tuning.options import Sampler
from rankzero.tuning.study import _distribution, _drawn, _grid_points, open_study
from rankzero.tuning.trial import REPEAT, State, Trial, Trials


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_study_draws_with_any_seed_of_a_training(tmp_path: Path, sampler: Sampler) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    study = open_study(url, "s", sampler=sampler, pruner="none", seed=2**40 + 7)
    study.draw_from({"dropout": Uniform(0.0, 1.0)})
    first, second = study.ask(), study.ask()
    assert study.known[first].parameters != study.known[second].parameters


@pytest.mark.filterwarnings("ignore:Fixed parameter")
def test_a_gaussian_process_learns_from_trials_that_have_no_value(tmp_path: Path) -> None:
    url = f"journal:///{tmp_path / 'studies'}"
    study = open_study(url, "s", sampler="gp", pruner="none", seed=0)
    study.draw_from({"width": Integer(8, 64)})
    # A user's own value may lie outside of its range.
    for own in (200, 8, 20, 30, 40, 50):
        study.tell(study.ask({"width": own}), "COMPLETE", 1 / own, {QUALITY: 0.0, MEMORY: 0.0}, {})
    drawn = [study.ask()]  # still runs
    for state, gaps in [("PRUNED", {QUALITY: 1.0, MEMORY: 0.0}), ("FAIL", {}), ("FAIL", {})]:
        drawn.append(study.ask())
        study.tell(drawn[-1], state, None, gaps, {})
    assert len({study.known[number].parameters["width"] for number in drawn}) == 4


def test_a_gaussian_process_sees_which_trials_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(number: int, state: State, value: float | None, **facts: int) -> Trial:
        return Trial(number, state, {"width": 8 + number}, value, {}, facts)

    seen = list[tuple[str, float | None]]()
    monkeypatch.setattr(
        optuna.Study, "add_trial", lambda _, one: seen.append((one.state.name, one.value))
    )
    done, running, copy = trial(0, "COMPLETE", 2.0), trial(1, "RUNNING", None), {REPEAT: 1}
    known = Trials([done, running, trial(2, "FAIL", None, **copy), trial(3, "PRUNED", None)])
    _drawn(optuna.samplers.RandomSampler(0), known, {"width": _distribution(Integer(8, 64))})
    assert seen == [("COMPLETE", 2.0), ("RUNNING", None), ("COMPLETE", 2.0)]


def test_a_grid_has_few_points_of_a_wide_range_of_integers() -> None:
    points = [_grid_points(_distribution(Integer(0, high))) for high in (99, 2000)]
    assert [len(points[0]), points[1]] == [100, [0, 500, 1000, 1500, 2000]]

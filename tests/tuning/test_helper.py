"""What a process that helps agrees on with the one that leads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rankzero import Choice, Experiment, Goal, Train
from rankzero.errors import RunFailed, UserError
from rankzero.tuning import helper, search
from rankzero.tuning.budget import SearchOptions
from rankzero.tuning.setup import SPACE, signature
from rankzero.tuning.space import make_space, narrowed
from rankzero.tuning.study import Study, open_study


class Mine(Experiment):
    train: Train = Train(batch_size=32)
    goal: Goal = Goal("val/accuracy", "max", target=0.9)


SPACE_OF_MINE = make_space(Mine(), 1, 0.5, samples=1000)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return open_study(f"sqlite:///{tmp_path / 's.db'}", "s", sampler="tpe", pruner="none", seed=0)


def test_a_helper_draws_from_what_the_leader_narrowed(study: Study) -> None:
    smaller = narrowed(SPACE_OF_MINE, [32, 64], ["fp32"])
    study.note(
        SPACE,
        {
            "batch_sizes": smaller.batch_sizes,
            "precisions": smaller.precisions,
            "signature": signature(smaller, SearchOptions()),
        },
    )
    assert helper.agreed(study, SPACE_OF_MINE, SearchOptions()).batch_sizes == (32, 64)
    assert search._agreed(study, SPACE_OF_MINE, [], SearchOptions()).batch_sizes == (32, 64), (
        "what is agreed stays"
    )


@pytest.mark.parametrize(
    "options", [SearchOptions(objective="throughput"), SearchOptions(tolerance=0.5)]
)
def test_another_objective_is_another_search(study: Study, options: SearchOptions) -> None:
    search._agreed(study, SPACE_OF_MINE, [], SearchOptions())
    with pytest.raises(UserError, match="need the same experiment"):
        helper.agreed(study, SPACE_OF_MINE, options)


def test_another_space_is_another_search(study: Study) -> None:
    search._agreed(study, SPACE_OF_MINE, [], SearchOptions())
    with pytest.raises(UserError, match="need the same experiment"):
        helper.agreed(
            study,
            dataclasses.replace(SPACE_OF_MINE, extras={"width": Choice(8, 16)}),
            SearchOptions(),
        )


def test_a_leader_that_dies_before_the_reference_is_told(study: Study) -> None:
    study.note("leader", "elsewhere/1/2 3 4")
    with pytest.raises(RunFailed, match="the same command takes over"):
        helper._await(study, (SPACE,))

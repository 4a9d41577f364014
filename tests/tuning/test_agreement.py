"""The space that the processes of a study agree on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rankzero import Choice, Experiment, Goal, Train
from rankzero.errors import UserError
from rankzero.tuning.agreement import (
    SPACE,
    agree_on_space,
    await_facts,
    check_space,
    space_of_version,
)
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.space import SPEED, make_space
from rankzero.tuning.study import Study, open_study


class Mine(Experiment):
    train: Train = Train(batch_size=32)
    goal: Goal = Goal("val/accuracy", "max", target=0.9)


SPACE_OF_MINE = make_space(Mine(), 1, 0.5, samples=1000)
MAP = [ProbeResult(size, size, "fp32", "ok", float(size)) for size in (32, 64)]


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return open_study(f"sqlite:///{tmp_path / 's.db'}", "s", sampler="tpe", pruner="none", seed=0)


def test_a_helper_draws_from_the_space_that_the_leader_narrowed(study: Study) -> None:
    assert agree_on_space(study, SPACE_OF_MINE, MAP, SearchOptions()).batch_sizes == (32, 64)
    assert check_space(study, SPACE_OF_MINE, SearchOptions()).batch_sizes == (32, 64)
    later = agree_on_space(study, SPACE_OF_MINE, [], SearchOptions())
    assert later.batch_sizes == (32, 64), "the first leader's space stays"


def test_all_processes_use_the_settings_of_speed_that_the_first_leader_measured(
    study: Study,
) -> None:
    speed = {"train.workers": 2}
    agree_on_space(study, SPACE_OF_MINE, MAP, SearchOptions(), speed)
    later = agree_on_space(study, SPACE_OF_MINE, MAP, SearchOptions(), {"train.compile": True})
    assert later.speed == check_space(study, SPACE_OF_MINE, SearchOptions()).speed == speed


def test_a_study_of_an_older_version_has_no_settings_of_speed(study: Study) -> None:
    agree_on_space(study, SPACE_OF_MINE, MAP, SearchOptions())
    old = {name: value for name, value in study.facts[SPACE].items() if name != "speed"}
    study.note(SPACE, {**old, "signature": "of the older version's ranges"})
    agree_on_space(study, SPACE_OF_MINE, MAP, SearchOptions())
    space = check_space(study, SPACE_OF_MINE, SearchOptions())
    assert space.speed == {} and SPEED not in space.parameters()


def test_a_grid_of_an_older_version_keeps_the_ranges_of_its_trials(study: Study) -> None:
    class Asked(Mine):
        width: int = 16
        search = {"width": Choice(16, 32)}

    space, grid = make_space(Asked(), 1, 0.5, samples=1000), SearchOptions(sampler="grid")
    assert set(space_of_version(study, space, grid).parameters()) == {"width"}
    assert space_of_version(study, space, SearchOptions()) == space
    study.note(SPACE, {"batch_sizes": space.batch_sizes, "precisions": ["fp32"], "signature": ""})
    assert space_of_version(study, space, grid) == space


@pytest.mark.parametrize(
    "options", [SearchOptions(objective="throughput"), SearchOptions(tolerance=0.5)]
)
def test_a_helper_with_another_objective_is_refused(study: Study, options: SearchOptions) -> None:
    agree_on_space(study, SPACE_OF_MINE, [], SearchOptions())
    with pytest.raises(UserError, match="need the same experiment"):
        check_space(study, SPACE_OF_MINE, options)


def test_a_helper_with_another_space_is_refused(study: Study) -> None:
    agree_on_space(study, SPACE_OF_MINE, [], SearchOptions())
    other = dataclasses.replace(SPACE_OF_MINE, extras={"width": Choice(8, 16)})
    with pytest.raises(UserError, match="need the same experiment"):
        check_space(study, other, SearchOptions())


def test_a_study_keeps_its_numbers_of_devices(study: Study) -> None:
    both = make_space(Mine(), 1, 0.5, samples=1000, more=(2,))
    assert agree_on_space(study, both, [], SearchOptions()).devices == (1, 2)
    assert check_space(study, both, SearchOptions()).devices == (1, 2)
    with pytest.raises(
        UserError, match="began with --nproc 1,2, and this command has --nproc 1: give"
    ):
        agree_on_space(study, SPACE_OF_MINE, [], SearchOptions())


def test_a_study_keeps_its_number_of_machines(study: Study) -> None:
    both = dataclasses.replace(make_space(Mine(), 4, 0.5, samples=1000), machines=2)
    agree_on_space(study, both, [], SearchOptions())
    with pytest.raises(UserError, match=r"with --nproc 2 --nnodes 2, and .* has --nproc 4: give"):
        agree_on_space(study, dataclasses.replace(both, machines=1), [], SearchOptions())


def test_a_study_of_one_number_of_devices_keeps_it(study: Study) -> None:
    space_of_version(study, SPACE_OF_MINE, SearchOptions())
    agree_on_space(study, SPACE_OF_MINE, [], SearchOptions())
    other = make_space(Mine(), 2, 0.5, samples=1000)
    # Before the probe, which may take minutes.
    with pytest.raises(
        UserError, match="--nproc 1, and this command has --nproc 2: give --nproc 1, or"
    ):
        space_of_version(study, other, SearchOptions())


def test_a_study_of_an_older_version_has_one_number_of_devices(study: Study) -> None:
    study.note(SPACE, {"batch_sizes": [32], "precisions": ["fp32"], "signature": "", "speed": {}})
    assert agree_on_space(study, SPACE_OF_MINE, [], SearchOptions()).devices == (1,)
    both = make_space(Mine(), 1, 0.5, samples=1000, more=(2,))
    with pytest.raises(
        UserError, match="--nproc 1, and this command has --nproc 1,2: give --nproc 1, "
    ):
        agree_on_space(study, both, [], SearchOptions())


def test_a_helper_does_not_wait_for_a_leader_that_died(study: Study) -> None:
    study.note("leader", "elsewhere/1/2 3 4")
    assert not await_facts(study, (SPACE,))
    study.note(SPACE, {})
    assert await_facts(study, (SPACE,))

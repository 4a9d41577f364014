"""The space that the processes of a study agree on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rankzero import Choice, Experiment, Goal, Train
from rankzero.config import override
from rankzero.errors import UserError
from rankzero.search_ranges import LogUniform
from rankzero.tuning import agreement
from rankzero.tuning.agreement import (
    SPACE,
    agree_on_space,
    await_facts,
    check_space,
    space_of_version,
)
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.space import BATCH, BATCH_INDEX, PRECISION, SPEED, make_space, only
from rankzero.tuning.study import Study, open_study


class Mine(Experiment):
    train: Train = Train(batch_size=32)
    goal: Goal = Goal("val/accuracy", "max", target=0.9)


class Wide(Mine):
    width: int = 8
    search = {"width": Choice(8, 16)}


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


def test_a_map_that_is_cut_rules_nothing_out_and_keeps_what_fitted(study: Study) -> None:
    cells = [ProbeResult(64, 64, "fp32", "ok", 64.0), ProbeResult(128, 64, "fp32", "ok", 64.0)]
    found = agree_on_space(study, SPACE_OF_MINE, cells, SearchOptions(), rules_out=False)
    assert found.batch_sizes == SPACE_OF_MINE.batch_sizes
    assert found.precisions == SPACE_OF_MINE.precisions
    assert found.micro_batches == {"1 x fp32": 64}


def test_the_map_rules_out_of_the_users_own_sizes_only_what_does_not_fit(study: Study) -> None:
    class Named(Mine):
        train: Train = Train(batch_size=128)
        search = {"train.batch_size": Choice(16, 32, 64, 128, 256, 512)}

    space = make_space(Named(), 1, 0.5, samples=10_000)
    lost = ProbeResult(256, 256, "fp32", "out of memory")
    measured = [*(ProbeResult(size, size, "fp32", "ok", 9.0) for size in (64, 128)), lost]
    found = agree_on_space(study, space, measured, SearchOptions())
    assert found.batch_sizes == (16, 32, 64, 128)
    assert check_space(study, space, SearchOptions()).batch_sizes == (16, 32, 64, 128)


def test_all_processes_use_the_settings_of_speed_that_the_first_leader_measured(
    study: Study,
) -> None:
    speed = {"train.workers": 2}
    agree_on_space(study, SPACE_OF_MINE, MAP, SearchOptions(), speed)
    later = agree_on_space(study, SPACE_OF_MINE, MAP, SearchOptions(), {"train.compile": True})
    assert later.speed == check_space(study, SPACE_OF_MINE, SearchOptions()).speed == speed


def test_no_trial_has_a_larger_micro_batch_than_the_probe_found_to_fit(study: Study) -> None:
    own = make_space(Mine(), 1, 0.5, ("fp32", "bf16"), samples=1000)
    measured = [
        *(ProbeResult(size, size, "fp32", "ok", float(size)) for size in (8, 16)),
        ProbeResult(32, 32, "fp32", "out of memory"),
        ProbeResult(64, 16, "fp32", "ok", 64.0),
        *(ProbeResult(size, size, "bf16", "ok", size + 1.0) for size in (16, 32, 64)),
    ]
    agree_on_space(study, own, measured, SearchOptions())
    space = check_space(study, own, SearchOptions())
    assert space.batch_sizes == (8, 16, 32, 64)
    found = {
        (index, precision): space.experiment({BATCH_INDEX: index, PRECISION: precision}).train
        for index in range(4)
        for precision in ("fp32", "bf16")
    }
    assert [found[index, "fp32"].micro_batch for index in range(4)] == [None, None, 16, 16]
    assert {found[index, "bf16"].micro_batch for index in range(4)} == {None}
    reference = space.experiment(space.reference_parameters()).train
    assert reference == override(Mine(), {"train.micro_batch": 16}).train
    assert "train.micro_batch=16" in space.warnings()[-1] and own.warnings() == []


@pytest.mark.parametrize(("strategy", "found"), [("tp", 64), ("pp", None)])
def test_a_trial_whose_batch_does_not_fit_accumulates_what_fitted(
    study: Study, strategy: str, found: int | None
) -> None:
    own = override(Mine(), {"train.strategy": strategy, "train.batch_size": 128})
    space = make_space(own, 2, 0.5, samples=1000)
    cells = [ProbeResult(64, 64, "fp32", "ok", 64.0, devices=2)]
    cells += [ProbeResult(128, 128, "fp32", "out of memory", devices=2)]
    agreed = agree_on_space(study, space, cells, SearchOptions())
    assert agreed.experiment(agreed.reference_parameters()).train.micro_batch == found
    assert agreed.experiment({BATCH_INDEX: 0}).train.micro_batch is None, "its batch fits"


def test_a_study_of_an_older_version_has_no_settings_of_speed(study: Study) -> None:
    agree_on_space(study, SPACE_OF_MINE, MAP, SearchOptions())
    old = {name: value for name, value in study.facts[SPACE].items() if name != "speed"}
    study.note(SPACE, {**old, "signature": "an older version's 'lr_factor'"})
    agree_on_space(study, SPACE_OF_MINE, MAP, SearchOptions())
    space = check_space(study, SPACE_OF_MINE, SearchOptions())
    assert space.speed == {} and SPEED not in space.parameters()


def test_an_older_study_keeps_its_range_of_learning_rates(study: Study) -> None:
    class Named(Mine):
        search = {"lr": Choice(0.1, 0.01)}

    space = make_space(Named(lr=0.1), 1, 0.5, samples=1000)
    assert space_of_version(study, space, SearchOptions()) == space
    agree_on_space(study, space, [], SearchOptions())
    assert space_of_version(study, space, SearchOptions()) == space
    study.note(
        SPACE, {name: one for name, one in study.facts[SPACE].items() if name != "lr_choice"}
    )
    old = space_of_version(study, space, SearchOptions())
    assert old.factors == LogUniform(0.01 / 0.1, 1.0)


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


def test_a_helper_with_another_kind_of_device_is_refused(study: Study) -> None:
    on_a100, on_h100 = (dataclasses.replace(SPACE_OF_MINE, device=one) for one in ("A100", "H100"))
    agree_on_space(study, on_a100, [], SearchOptions())
    with pytest.raises(UserError, match=r"on A100, this command .* on H100: .* kind of device"):
        check_space(study, on_h100, SearchOptions())
    # The queue gave the next leader another machine.
    agree_on_space(study, on_h100, [], SearchOptions())
    assert check_space(study, on_h100, SearchOptions()).batch_sizes
    with pytest.raises(UserError, match=r"on H100, this command .* on A100"):
        check_space(study, on_a100, SearchOptions())


def test_a_helper_with_another_space_is_refused(study: Study) -> None:
    agree_on_space(study, SPACE_OF_MINE, [], SearchOptions())
    other = dataclasses.replace(SPACE_OF_MINE, extras={"width": Choice(8, 16)})
    with pytest.raises(UserError, match="need the same experiment"):
        check_space(study, other, SearchOptions())


@pytest.mark.parametrize(
    ("changes", "options", "wanted", "given"),
    [
        ({"lr": 0.01}, SearchOptions(), "lr=0.001", "lr=0.01"),
        ({"train.seed": 1}, SearchOptions(), "train.seed=0", "train.seed=1"),
        (
            {"width": 16, "goal.target": None},
            SearchOptions(objective="throughput"),
            "--objective=time-to-target, goal.target=0.9, width=8",
            "--objective=throughput, goal.target=none, width=16",
        ),
    ],
)
def test_a_study_keeps_its_settings(
    study: Study, changes: dict[str, object], options: SearchOptions, wanted: str, given: str
) -> None:
    own = make_space(Wide(), 1, 0.5, samples=1000)
    agree_on_space(study, own, [], SearchOptions())
    other = make_space(override(Wide(), changes), 1, 0.5, samples=1000)
    with pytest.raises(UserError) as caught:
        space_of_version(study, other, options)
    assert str(caught.value) == (
        f"study s began with {wanted}, and this command has {given}: give {wanted}, or --new, or "
        "another --name"
    )


def test_a_helper_with_other_settings_is_refused(study: Study) -> None:
    agree_on_space(study, SPACE_OF_MINE, [], SearchOptions())
    other = make_space(override(Mine(), {"train.clip": 1.0}), 1, 0.5, samples=1000)
    with pytest.raises(UserError, match=r"with train.clip=none, and this command has train.cl"):
        check_space(study, other, SearchOptions())


def test_a_study_keeps_its_ranges(study: Study) -> None:
    class Other(Wide):
        search = {"width": Choice(8, 16, 32)}

    agree_on_space(study, make_space(Wide(), 1, 0.5, samples=1000), [], SearchOptions())
    for space, given in (
        (make_space(Other(), 1, 0.5, samples=1000), r"Choice\(options=\(8, 16, 32\)\)"),
        (SPACE_OF_MINE, "nothing"),
    ):
        wanted = r"search\['width'\]=Choice\(options=\(8, 16\)\)"
        with pytest.raises(UserError, match=rf"{wanted}, and this command has .*={given}: give"):
            space_of_version(study, space, SearchOptions())


def test_a_study_continues_with_settings_that_change_no_result(study: Study) -> None:
    agree_on_space(study, SPACE_OF_MINE, MAP, SearchOptions())
    for key, value in (
        ("train.log_every", 5),
        ("train.checkpoints.keep", 3),
        ("train.test", False),
    ):
        other = make_space(override(Mine(), {key: value}), 1, 0.5, samples=1000)
        options = SearchOptions(trials=99, minutes=5.0, seeds=4, challengers=2, pruner="none")
        space = space_of_version(study, other, options)
        assert agree_on_space(study, space, [], options).batch_sizes == (32, 64)
    # A folder of a helper's machine.
    placed = type("Placed", (Mine,), {"__annotations__": {"data_at": str}, "data_at": "/a"})
    assert agreement._settings(make_space(placed(), 1, 0.5, samples=1000), SearchOptions()) == (
        agreement._settings(SPACE_OF_MINE, SearchOptions())
    )
    # A setting that the file, or another version of RankZero, has in addition.
    grown = type("Grown", (Mine,), {"__annotations__": {"width": int}, "width": 8})
    space_of_version(study, make_space(grown(), 1, 0.5, samples=1000), SearchOptions())


def test_a_study_of_an_older_version_stored_no_settings(study: Study) -> None:
    agree_on_space(study, SPACE_OF_MINE, [], SearchOptions())
    old = {name: value for name, value in study.facts[SPACE].items() if name != "settings"}
    study.note(SPACE, old)
    other = make_space(override(Mine(), {"lr": 0.01}), 1, 0.5, samples=1000)
    assert agree_on_space(
        study, space_of_version(study, other, SearchOptions()), [], SearchOptions()
    )
    # The index of a batch size would mean another one.
    other = make_space(override(Mine(), {"train.batch_size": 96}), 1, 0.5, samples=1000)
    with pytest.raises(UserError, match=r"batch sizes 1, 2, 4, 8, .* and this command the batch"):
        agree_on_space(study, other, [], SearchOptions())


@pytest.mark.parametrize("lr", [False, True])
def test_a_study_keeps_its_knobs(study: Study, lr: bool) -> None:
    fixed = only(SPACE_OF_MINE, {BATCH})
    first, other = (SPACE_OF_MINE, fixed) if lr else (fixed, SPACE_OF_MINE)
    agree_on_space(study, first, MAP, SearchOptions())
    agree_on_space(study, first, MAP, SearchOptions())
    with pytest.raises(UserError, match=r"one learning rate.*: give the same settings, --knobs"):
        agree_on_space(study, other, MAP, SearchOptions())


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
    old = {"batch_sizes": [32], "precisions": ["fp32"], "signature": "'lr_factor'", "speed": {}}
    study.note(SPACE, old)
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

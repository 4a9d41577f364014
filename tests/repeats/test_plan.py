"""Which runs a repeat has, and which mistakes it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rankzero.errors import UserError
from rankzero.repeats.plan import file_of, make_plan, refuse_taken_names, run_names, stored
from support.runs import make_folder


def test_every_combination_on_every_seed_with_all_folds_first() -> None:
    plan = make_plan(["fold=0,1", "train.precision=fp32,bf16"], "2", 7, None)
    labels = [one.label for one in plan]
    assert len(labels) == 8 and labels[:2] == [
        "fold=0, train.precision=fp32, seed=0",
        "fold=0, train.precision=bf16, seed=0",
    ]
    assert [one.seed for one in plan] == [0] * 4 + [1] * 4
    last = list(plan)[-1]
    assert last.settings == {"fold": "1", "train.precision": "bf16", "train.seed": 1}
    assert last.name("digits-repeat") == "digits-repeat-fold1-precisionbf16-seed1"


def test_a_list_has_values_with_commas() -> None:
    plan = make_plan(['augment=["flip,crop", "none"]', 'sizes=["1"],["2"]'], "1", 7, None)
    assert plan.over == {"augment": ("flip,crop", "none"), "sizes": ('["1"]', '["2"]')}
    assert make_plan(["fold=0, 1"], "1", 7, None).over == {"fold": ("0", "1")}


@pytest.mark.parametrize(
    ("over", "seeds", "found"),
    [
        ([], None, (0, 1, 2)),
        ([], "2", (0, 1)),
        ([], "5,7", (5, 7)),
        ([], "5,", (5,)),
        (["fold=0,1"], None, (9,)),
    ],
)
def test_seeds(over: list[str], seeds: str | None, found: tuple[int, ...]) -> None:
    assert tuple(make_plan(over, seeds, 9, None).seeds) == found


@pytest.mark.parametrize(
    ("over", "seeds", "says"),
    [
        (["fold"], None, "--over takes key=value,value"),
        (["fold="], None, "--over takes key=value,value"),
        (["train.seed=1,2"], None, "write --seeds 1,2"),
        (["fold=0,1,0"], None, "is given once"),
        (["fold=0", "fold=1"], None, "is given once"),
        (["kind=a/b,a-b"], None, "would have the same name"),
        ([], "0", "--seeds takes their number"),
        ([], "three", "--seeds takes their number"),
        ([], "-1", "--seeds takes their number"),
    ],
)
def test_mistakes(over: list[str], seeds: str | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_plan(over, seeds, 0, None)


def test_runs_with_long_values_have_names_of_their_own() -> None:
    values = [f"sentence-transformers/paraphrase-multilingual-mpnet-base-v2-{n}" for n in (1, 2)]
    plan = make_plan([f"backbone={','.join(values)}", "data=/datasets/imagenet/train-a"], "3", 0, 2)
    found = [one.name("r") for one in plan]
    assert len(set(found)) == 6 and all(len(name) <= 82 for name in found)
    assert [name.rpartition("-")[2] for name in found[::2]] == ["seed0", "seed1", "seed2"]


def test_only_runs_of_a_repeat_may_have_the_names_of_its_runs(tmp_path: Path) -> None:
    folder, plan = make_folder(tmp_path, name="r"), make_plan([], "3", 0, None)
    make_folder(tmp_path, name="r-seed0", parent="r")
    with pytest.raises(UserError, match="'r-seed0' already, which is no part of this repeat"):
        refuse_taken_names(plan, folder)
    file_of(folder).parent.mkdir()
    file_of(folder).write_text(json.dumps({**dataclasses.asdict(plan), "runs": []}))
    # A new repeat has no run yet. One that continues may have this one.
    refuse_taken_names(plan, folder)
    make_folder(tmp_path, name="r-seed1", parent="another")
    with pytest.raises(UserError, match="'r-seed1' already, which is no part of this repeat"):
        refuse_taken_names(plan, folder)
    folder.add_child("r-seed1")
    refuse_taken_names(plan, folder)


def test_runs_of_an_older_version_keep_their_names(tmp_path: Path) -> None:
    folder, plan = make_folder(tmp_path), make_plan([f"data={'x' * 99}"], "3,", 0, None)
    cut = f"{folder.path.name}-data{'x' * 76}"
    file_of(folder).parent.mkdir()
    rows = [{"run": cut, **one.settings, "status": "FINISHED"} for one in plan]
    file_of(folder).write_text(json.dumps({**dataclasses.asdict(plan), "runs": rows}))
    found = run_names(plan.extended({}, (4,), None), folder)
    assert found[0] == cut and found[1].endswith("-seed4")


@pytest.mark.parametrize("field", ["run", "metrics"])
def test_a_setting_may_have_the_name_of_a_column(tmp_path: Path, field: str) -> None:
    folder, plan = make_folder(tmp_path), make_plan([f"{field}=a,b"], "1", 0, None)
    names = run_names(plan, folder)
    file_of(folder).parent.mkdir()
    rows = [{"run": "x", "metrics": {"loss": 1.0}, **one.settings} for one in plan]
    file_of(folder).write_text(json.dumps({**dataclasses.asdict(plan), "runs": rows}))
    assert run_names(plan, folder) == names


def test_a_continued_repeat_gets_further_runs_and_loses_none() -> None:
    before = make_plan(["fold=0,1"], "3,", 0, None)
    plan = before.extended({"fold": ("2", "1")}, (4, 3), 2)
    assert plan.over == {"fold": ("0", "1", "2")} and plan.seeds == (3, 4) and plan.nproc == 2
    assert len(list(plan)) == 6 and list(before.extended({}, (), None)) == list(before)
    with pytest.raises(UserError, match=r"--over width: the runs of this repeat vary fold: start"):
        before.extended({"width": ("8",)}, (), None)
    with pytest.raises(UserError, match="would have the same name"):
        make_plan(["kind=a/b"], "1", 0, None).extended({"kind": ("a-b",)}, (), None)


def test_plan_is_read_back_as_it_was_stored(tmp_path: Path) -> None:
    folder, plan = make_folder(tmp_path), make_plan(["fold=0,1"], "3", 0, 2)
    assert stored(folder) is None
    file_of(folder).parent.mkdir()
    file_of(folder).write_text(json.dumps({**dataclasses.asdict(plan), "runs": []}))
    again = stored(folder)
    assert again is not None and again.nproc == 2
    assert [one.label for one in again] == [one.label for one in plan]
    file_of(folder).write_text("{")
    with pytest.raises(UserError, match="start a new repeat"):
        stored(folder)

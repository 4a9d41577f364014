"""Conditions on runs, and their order."""

from __future__ import annotations

import math
import time

import pytest

from rankzero.catalog.filters import candidates, parse, select
from rankzero.catalog.summary import Details, Summary
from rankzero.errors import UserError

DETAILS = Details(
    params={"lr": "0.01", "augment": "true", "widths": "[64, 128]"},
    metrics={"val/accuracy": 0.8, "val/loss": 0.3, "lr": 1e-9, "gap": math.nan},
    tags={"cmd": "a=b!", "release": "1.10"},
)
ONE = Summary(
    "a",
    lambda: DETAILS,
    "a",
    "digits",
    "FINISHED",
    "",
    time.time() - 3600,
    5.0,
    "val/accuracy",
    0.9,
    100.0,
    False,
    None,
    "id",
    "0123abcd",
)


@pytest.mark.parametrize(
    ("word", "holds"),
    [
        ("status=FINISHED", True),
        ("status=finished", True),
        ("status!=FINISHED", False),
        ("run=a*", True),
        ("experiment=digits", True),
        ("data=0123abcd", True),
        ("data=0123", False),
        ("experiment==mnist", False),
        ("val/accuracy>0.85", True),
        ("val/loss<0.3", False),
        ("val/loss<=0.3", True),
        ("lr=1e-2", True),
        ("lr != 0.02", True),
        ("augment=true", True),
        ("widths=[64, 128]", True),
        ("widths!=[64, *]", False),
        ("cmd=a=b!", True),
        ("cmd!=a=*", False),
        ("status!=a = b", True),
        ("status!=*64 -> 32*", True),
        ("status!=Hello, world!!", True),
        ("status!=python a.py --lr=0.1", True),
        ("gap=nan", True),
        ("gap!=nan", False),
        ("gap=0", False),
        ("age>59min", True),
        ("age<1d", True),
        ("duration=5s", True),
        ("samples/s>=100", True),
        ("parent=s", False),
        ("parent!=s", False),
        ("status>3", False),
        ("release=1.1", False),
        ("release!=1.1", True),
        ("release<2", True),
    ],
)
def test_a_condition_holds_for_a_run(word: str, holds: bool) -> None:
    assert parse(word).holds(ONE) is holds


@pytest.mark.parametrize("word", ["status", "=3", "lr>high", "lr=>3", "lr=0.1 train.seed=3", ""])
def test_a_text_that_is_no_condition_is_an_error(word: str) -> None:
    with pytest.raises(UserError):
        parse(word)


def test_runs_without_the_key_come_last() -> None:
    runs = [
        ONE._replace(name=name, best=best) for name, best in (("x", None), ("y", 0.2), ("z", 0.7))
    ]
    assert [one.name for one in select(runs, [], "best")] == ["y", "z", "x"]
    assert [one.name for one in select(runs, [], "-best")] == ["z", "y", "x"]
    assert [one.name for one in select(runs, [parse("best<0.5")], "run")] == ["y"]


def test_fields_of_the_json_are_keys_unless_a_param_has_the_name() -> None:
    run = ONE._replace(bytes=200)
    assert select([run], [parse("bytes>100")], "seconds") == [run]
    run = run._replace(details=lambda: Details({"bytes": "1"}, {}, {}))
    assert select([run], [parse("bytes>100")]) == []


def test_a_key_that_no_run_has_is_an_error() -> None:
    with pytest.raises(UserError, match="did you mean 'val/loss'"):
        select([ONE], [parse("loss<1")])
    with pytest.raises(UserError, match="no run has 'zzz'; `rankzero runs --json` has all"):
        select([ONE], [parse("zzz=1")])
    assert select([], [parse("loss<1")], "lr") == []


def test_a_condition_on_a_run_or_a_parent_finds_children() -> None:
    child = ONE._replace(name="s-t00", parent="s", mlflow_run_id="c1")

    def found(*words: str, everything: bool = False) -> list[str]:
        conditions = [parse(word) for word in words]
        among = candidates([ONE, child], conditions, everything=everything)
        return [run.name for run in select(among, conditions)]

    assert found("parent=s") == found("run=s-t00") == found("id=c1") == ["s-t00"]
    assert found("parent=s*") == ["s-t00"] and found("run=*") == [ONE.name]
    assert found() == found("run!=x") == [ONE.name]
    assert found("run!=x", everything=True) == [ONE.name, "s-t00"]

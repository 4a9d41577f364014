"""Names, values and lengths that MLflow accepts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankzero import scalars
from rankzero.mlflow_store import limits


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("train/loss", "train/loss"),
        ("throughput(tps)", "throughput_tps_"),
        ("a%b=c", "a_b_c"),
        ("/lead//double/", "lead/double"),
        ("../up", "_/up"),
        ("", "unnamed"),
        (".", "unnamed"),
        ("größe", "größe"),
        ("time: s", "time_ s"),
    ],
)
def test_illegal_characters_are_replaced_in_names(raw: str, expected: str) -> None:
    assert limits.name(raw) == expected


# The first example imports mlflow, which takes longer than the deadline.
@settings(deadline=None)
@given(st.text())
def test_any_text_becomes_a_name_that_mlflow_accepts(text: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    name = limits.name(text)
    _validate_metric_name(name)
    assert len(name) <= limits.KEY_LENGTH
    assert limits.name(name) == name


def test_long_names_stay_different() -> None:
    first, second = limits.name("x" * 400 + "a"), limits.name("x" * 400 + "b")
    assert len(first) == limits.KEY_LENGTH
    assert first != second


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        ("0.5", 0.5),
        (None, None),
        ("x", None),
        ([1], None),
        ({}, None),
        (-2.5, -2.5),
    ],
)
def test_numbers_are_read_from_any_value(raw: object, expected: float | None) -> None:
    assert scalars.number(raw) == expected


@pytest.mark.parametrize("raw", [math.inf, -math.inf, math.nan, 10**400])
def test_a_number_that_is_not_finite_becomes_nan(raw: float) -> None:
    value = scalars.number(raw)
    assert value is not None
    assert math.isnan(value)


@pytest.mark.parametrize(
    ("raw", "expected"), [(5, 5), (5.0, 5), (5.5, None), ("5", None), (2**70, None), (None, None)]
)
def test_steps_are_whole_numbers(raw: object, expected: int | None) -> None:
    assert scalars.step(raw) == expected


@pytest.mark.parametrize(
    ("raw", "expected"), [(1.5, 1500), (math.nan, None), (-1, None), ("x", None), (1e30, None)]
)
def test_times_become_milliseconds(raw: object, expected: int | None) -> None:
    assert scalars.milliseconds(raw) == expected


def test_a_traceback_keeps_its_end_and_a_value_its_beginning() -> None:
    assert limits.tail("begin" + "x" * 100 + "end", 10) == "…xxxxxxend"
    assert limits.head("begin" + "x" * 100 + "end", 10) == "beginxxxx…"
    assert limits.head("a\x00b\ud800", 10) == "ab?"


def test_a_param_with_another_value_becomes_a_tag() -> None:
    params = {"lr": "0.1", "train.epochs": "20", "width": "8"}
    new, tags = limits.new_and_changed(params, {"lr": "0.1", "train.epochs": "10"})
    assert new == {"width": "8"}
    assert tags == {"rankzero.param.train.epochs": "20"}


def test_a_param_that_returns_to_its_first_value_has_it_in_its_tag() -> None:
    _, tags = limits.new_and_changed({"lr (max)": "0.1"}, {"lr _max_": "0.2"})
    (tag,) = map(limits.name, tags)
    _, tags = limits.new_and_changed({"lr (max)": "0.2"}, {"lr _max_": "0.2"}, [tag])
    assert tags == {"rankzero.param.lr (max)": "0.2"}


def test_a_param_is_compared_as_mlflow_stores_it() -> None:
    long = "x" * (limits.PARAM_LENGTH + 10)
    stored, _ = limits.new_and_changed({"text": long}, {})
    assert len(stored["text"]) == limits.PARAM_LENGTH
    assert limits.new_and_changed({"text": long}, stored) == ({}, {})

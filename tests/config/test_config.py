"""Configs: flatten, override, YAML, and the errors for wrong settings."""

from __future__ import annotations

import dataclasses
import enum
import fractions
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.config import (
    ConfigError,
    checked,
    flatten,
    from_yaml,
    override,
    parse_assignments,
    read_yaml,
    refuse_stale,
    rendered,
    stale,
    to_yaml,
)
from rankzero.config.values import NONE_WORDS, coerce, render


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 1e-3
    mode: Literal["fast", "exact"] = "fast"
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate: must be at least 0, got {self.rate}")


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    width: int = 32
    name: str = "x"
    on: bool = False
    sizes: tuple[int, ...] = (1, 2)
    words: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    kernel: tuple[int, int] = (3, 3)
    grid: tuple[tuple[int | None, ...], ...] = ()
    number: float | int = 1
    switch: Literal["on", "off", 1, 2] = "on"
    data_: str = "real"


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)  # surrogates are no text
inners = st.builds(
    Inner,
    rate=st.floats(min_value=0, allow_nan=False),
    mode=st.sampled_from(["fast", "exact"]),
    limit=st.none() | st.integers(),
)
outers = st.builds(
    Outer,
    inner=inners,
    width=st.integers(),
    name=texts,
    on=st.booleans(),
    sizes=st.lists(st.integers()).map(tuple),
    words=st.lists(texts).map(tuple),
    rates=st.lists(st.floats(allow_nan=False)).map(tuple),
    kernel=st.tuples(st.integers(), st.integers()),
    grid=st.lists(st.lists(st.none() | st.integers()).map(tuple)).map(tuple),
    number=st.integers() | st.floats(allow_nan=False),
    switch=st.sampled_from(["on", "off", 1, 2]),
    data_=texts,
)


@given(outers)
def test_yaml_round_trip(config: Outer) -> None:
    assert from_yaml(Outer, to_yaml(config)) == config


@given(outers)
def test_text_round_trip(config: Outer) -> None:
    assert override(Outer(), rendered(config)) == config


@given(outers)
def test_value_round_trip(config: Outer) -> None:
    assert override(Outer(), flatten(config)) == config


def test_keys_are_dotted_and_lose_a_trailing_underscore() -> None:
    keys = list(flatten(Outer()))
    assert keys[:4] == ["inner.rate", "inner.mode", "inner.limit", "width"] and keys[-1] == "data"


def test_override_does_not_change_the_original() -> None:
    before = Outer()
    after = override(before, {"inner.rate": "1e-2", "width": 64})
    assert (before.inner.rate, after.inner.rate, after.width) == (1e-3, 1e-2, 64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.width = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("widht", "width"),
        ("rate", "inner.rate"),
        ("iner.rate", "inner.rate"),
        ("inner.moed", "inner.mode"),
    ],
)
def test_misspelt_key_suggests_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        override(Outer(), {key: "1"})


def test_group_key_lists_its_settings() -> None:
    with pytest.raises(ConfigError, match=r"is a group: set one of inner\.rate"):
        override(Outer(), {"inner": "1"})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("width", "3.5", "width: expected int, got '3.5'"),
        ("width", "true", "width: expected int"),
        ("on", "maybe", "on: expected bool"),
        ("inner.mode", "slow", "expected fast | exact"),
        ("inner.rate", "nan", "inner.rate: expected float"),
        ("inner.rate", "-1", "inner.rate: must be at least 0"),
        ("inner.limit", "many", "expected int | none"),
        ("sizes", "[1, x]", "expected list of int"),
        ("sizes", "[1, 2", "expected list of int"),
        ("kernel", "3", "expected [int, int]"),
        ("kernel", "3,3,3", "expected [int, int]"),
        ("width", "1e23", "expected int"),
        ("width", "inf", "expected int"),
        ("width", None, "expected int, got None"),
    ],
)
def test_wrong_value_is_reported_with_its_key(key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        override(Outer(), {key: value})
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"width": 0.5}, "width: expected int, got 0.5"),
        ({"inner": Inner(mode="slow")}, "inner.mode: expected fast | exact, got 'slow'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_value_of_the_file_is_reported_too(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        checked(Outer(**wrong))
    assert says in str(raised.value)


def test_numbers_of_numpy_and_enums_are_plain_values_in_yaml() -> None:
    class Name(str, enum.Enum):  # noqa: UP042 (whose text is another than that of a StrEnum)
        A = "a"

    class Number(int, enum.Enum):
        A = 7

    assert render(Number.A) == "7"
    odd: dict[str, Any] = {"width": numpy.int64(7), "name": Name.A, "sizes": (numpy.int64(3),)}
    given = Outer(inner=Inner(rate=numpy.float64(0.1)), **odd)
    assert rendered(given)["name"] == "a"
    after = from_yaml(Outer, to_yaml(given))
    assert after == checked(given) == given
    assert [type(checked(given).inner.rate), type(checked(given).name)] == [float, str]
    for value in (numpy.float32(2.7), fractions.Fraction(7, 2)):
        with pytest.raises(ConfigError, match=r"^width: expected int, got"):
            override(Outer(), {"width": value})


def test_yaml_takes_the_config_of_an_own_loop() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own:
        layers: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
        lr: float = 1.0

        def __post_init__(self) -> None:
            object.__setattr__(self, "lr", self.lr * 2)

    assert read_yaml(to_yaml(Own())) == {"layers": [1, 2], "lr": 2.0}


def test_value_of_the_file_is_read_as_its_type_and_else_left_alone() -> None:
    wrong: dict[str, Any] = {"width": "7", "inner": Inner(rate=1), "sizes": [1]}
    after = checked(Outer(**wrong))
    assert (after.width, after.sizes) == (7, (1,))
    assert render(after.inner.rate) == "1"


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("1e5", int, 100_000),
        ("1_000", int, 1000),
        ("3e-3", float, 0.003),
        ("inf", float, float("inf")),
        ("Yes", bool, True),
        ("none", int | None, None),
        ("1, 2", tuple[int, ...], (1, 2)),
        ("", tuple[int, ...], ()),
        ("1, x", tuple[int, str], (1, "x")),
        ("[a, b]", tuple[str, ...], ("a", "b")),
        ("null", str | None, None),
        ("2", str | int, 2),
        ("9007199254740993", float | int, 2**53 + 1),
        ("true", bool | int, True),
    ],
)
def test_text_is_read_as_the_declared_type(text: str, annotation: Any, value: Any) -> None:
    assert coerce(text, annotation) == value


@given(texts)
def test_none_words_become_none_or_stay_text(text: str) -> None:
    assert coerce(text, str | None) == (None if text.strip().lower() in NONE_WORDS else text)


@given(st.text(max_size=8))
def test_any_text_is_a_value_or_a_config_error(text: str) -> None:
    for key in flatten(Outer()):
        try:
            changed = override(Outer(), {key: text})
        except ConfigError as error:
            assert key in str(error)
        else:
            assert override(Outer(), flatten(changed)) == changed


@given(st.text(st.characters(exclude_characters="="), min_size=1), texts)
def test_assignment_is_split_at_the_first_equals_sign(key: str, value: str) -> None:
    assert parse_assignments([f"{key}={value}"]) == {key.strip(): value}


def test_assignments_are_read_and_the_last_one_wins() -> None:
    assert parse_assignments(["a=1", "b=x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    with pytest.raises(ConfigError, match="write key=value"):
        parse_assignments(["a"])


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "3"])
def test_yaml_that_is_not_a_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        from_yaml(Outer, text)


def test_yaml_executes_no_code() -> None:
    with pytest.raises(ConfigError):
        from_yaml(Outer, "name: !!python/object/apply:os.system ['true']\n")


def test_yaml_replaces_the_values_of_some_keys() -> None:
    text = to_yaml(Outer(), instead={"inner.rate": "hidden"})
    assert read_yaml(text) == {**read_yaml(to_yaml(Outer())), "inner.rate": "hidden"}


@dataclasses.dataclass(frozen=True)
class Net:
    width: int = 32
    hidden: int = 0
    twice: int = 0
    folder: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", self.hidden or 4 * self.width)
        object.__setattr__(self, "twice", 2 * self.width)
        object.__setattr__(self, "folder", self.folder or Path.cwd().name)


@dataclasses.dataclass(frozen=True)
class Model:
    net: Net = Net(width=64)
    depth: int = 1


def test_a_change_is_refused_that_a_computed_field_would_not_follow() -> None:
    for config, prefix in ((Net(), ""), (Net(8), ""), (Model(), "net.")):
        text = f"^{prefix}hidden follows from {prefix}width in .*, and would keep its value:"
        with pytest.raises(ConfigError, match=text):
            refuse_stale(config, {f"{prefix}width": 16})
    given = {"width": "16", "hidden": 3, "folder": "x"}
    assert stale(Net(), given) is None
    assert override(Net(), given).twice == 32
    older = from_yaml(Net, "width: 64")  # of a version that did not refuse it
    assert older.hidden == 128
    assert stale(Model(net=older), {"depth": 2, "net.folder": "x"}) is None

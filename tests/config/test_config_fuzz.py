"""Any file or assignment gives a config or a ConfigError, and no other exception."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.test_config import Outer
from rankzero.config import (
    ConfigError,
    flatten,
    from_yaml,
    override,
    parse_assignments,
    read_file,
    read_yaml,
    rendered,
    to_yaml,
)
from rankzero.config.renamed import with_new_names
from rankzero.experiment import Experiment, Train
from support.fuzz import patient, thorough

pytestmark = patient

WORDS = [
    "",
    " ",
    "none",
    "~",
    "true",
    "no",
    "0",
    "-0",
    "1e5",
    "1e400",
    "-1e999",
    "nan",
    "inf",
    "-.inf",
    ".nan",
    "0x1f",
    "0o7",
    "1:30:00",
    "9" * 400,
    "9" * 5000,
    "0x" + "f" * 5000,
    "2001-13-45",
    "2001-01-01",
    "12e",
    "1_000",
    "１２",
    "²",
    "½",
    "[",
    "]",
    "[1,2]",
    "[[1,2],[null]]",
    "{",
    "{a: b}",
    "- 1",
    "'",
    '"',
    "\\",
    "&a",
    "*a",
    "<<",
    "!!binary x",
    "!!int x",
    "!!int",
    "!!bool maybe",
    "!!float y",
    "!!timestamp z",
    "!!set {1}",
    "!!omap [1]",
    "!!python/object/apply:os.system [x]",
    "!!python/name:os.system",
    "!x y",
    "%YAML 9.9",
    "---",
    "...",
    "\x00",
    "\ud800",
    "\U0001f600",
    "\u2028",
    "\x85",
    "\t",
    "a=b",
    "=",
    "key: value",
    ": ",
    "? [1]",
    "|",
    ">-",
    "@",
    "`",
    "#",
    ",",
    "on",
    "fast",
    "x" * 3000,
]
words = (
    st.sampled_from(WORDS) | st.text(max_size=30) | st.floats().map(str) | st.integers().map(str)
)
keys = (
    st.sampled_from(
        [*flatten(Outer()), *flatten(Experiment()), "inner", "train", "train.", ".", "a.b.c", ""]
    )
    | words
)
line = st.builds(
    lambda indent, key, value: f"{' ' * indent}{key}: {value}", st.integers(0, 4), keys, words
)
documents = st.lists(line | words, max_size=8).map("\n".join)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Return what a config's file may become: cut, overwritten, doubled, its bytes flipped."""
    text = bytearray(to_yaml(draw(st.sampled_from([Outer(), Experiment(), Train()]))).encode())
    dice = random.Random(draw(st.integers(0, 2**32)))
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(text) + 1)
        match dice.randrange(4):
            case 0:
                del text[at:]
            case 1:
                text[at:at] = dice.choice(WORDS).encode("utf-8", "surrogatepass")
            case 2:
                text[at : at + 1] = bytes([dice.randrange(256)])
            case _:
                text[at:at] = text[dice.randrange(len(text) + 1) :][:50]
    return bytes(text)


@thorough
@given(documents | damaged().map(lambda content: content.decode("utf-8", "replace")))
def test_any_file_is_a_config_or_a_config_error(text: str) -> None:
    for cls in (Outer, Train):
        try:
            config = from_yaml(cls, text)
        except ConfigError as error:
            assert len(str(error)) < 3000
        else:
            assert from_yaml(cls, to_yaml(config)) == config


@thorough
@given(damaged() | st.binary(max_size=40))
def test_any_bytes_are_settings_or_a_config_error_that_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    try:
        found = read_file(path)
    except ConfigError as error:
        assert str(path) in str(error) and len(str(error)) < 3000
    else:
        # Damage may make an old name of a setting, which gets its new one.
        assert repr(found) == repr(with_new_names(read_yaml(content.decode("utf-8-sig"))))


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "marked.yaml"
    path.write_bytes(b"\xef\xbb\xbfwidth: 8\r\nname: \xc3\xa9\r\n")
    assert read_file(path) == {"width": 8, "name": "é"}


def test_folder_instead_of_a_settings_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path)


@thorough
@given(st.lists(st.builds("{}={}".format, keys, words) | words, max_size=4))
def test_any_assignments_are_a_config_or_a_config_error(assignments: list[str]) -> None:
    for start in (Outer(), Experiment()):
        try:
            config: Any = override(start, parse_assignments(assignments))
        except ConfigError as error:
            assert len(str(error)) < 3000
        else:
            assert override(start, rendered(config)) == config
            assert from_yaml(type(config), to_yaml(config)) == config


@pytest.mark.parametrize("value", ["1e400", "-1e999", "9" * 400])
def test_number_beyond_a_float_does_not_become_infinity(value: str) -> None:
    with pytest.raises(ConfigError, match="rate: expected float"):
        override(Outer(), {"inner.rate": value})


@pytest.mark.parametrize(
    "text",
    [
        "name: 2001-13-45",
        "width: !!int x",
        "width: !!int",
        "on: !!bool maybe",
        "a: !!timestamp z",
        "name: !!binary ä",
        "a: " + "[" * 5000,
        "width: " + "9" * 5000,
        "width: 1\nwidth: 2",
        "inner: {rate: 1.0e+999}",
    ],
)
def test_errors_inside_pyyaml_become_config_errors(text: str) -> None:
    with pytest.raises(ConfigError):
        from_yaml(Outer, text)


def test_integer_with_too_many_digits_is_a_config_error() -> None:
    # Also where no setting needs an integer: what prints the value would raise.
    for text in ("width: 0x" + "f" * 5000, "sizes: [0x" + "f" * 5000 + "]"):
        with pytest.raises(ConfigError, match="digits"):
            read_yaml(text)


def test_text_that_no_file_can_hold_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="name: expected str"):
        override(Outer(), {"name": "half \ud83d"})


def test_alias_bomb_is_refused_quickly() -> None:
    lines = [
        "a0: &a0 {x: 1, y: 2}",
        *(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 60)),
    ]
    start = time.monotonic()
    for text in ("\n".join(lines), "a: &a {b: *a}", "name: &x [*x]"):
        with pytest.raises(ConfigError, match="alias"):
            read_yaml(text)
    assert time.monotonic() - start < 5


def test_written_yaml_has_no_aliases() -> None:
    pair = (1, None)
    assert "&" not in to_yaml(Outer(grid=(pair, pair), sizes=(1, 2), words=("a", "a")))


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:pathlib.Path.touch [{}]",
        "!!python/object/new:os.system ['touch {}']",
        "!!python/object/apply:os.system ['touch {}']",
        "!!python/name:os.system",
    ],
)
@pytest.mark.parametrize(
    "place", ["name: {}", "{}", "inner: {}", "sizes: [{}]", "? {}\n: x", "<<: {}", "a: &a {}"]
)
def test_planted_yaml_runs_no_code(text: str, place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        from_yaml(Outer, place.format(text.format(tmp_path / "executed")))
    with pytest.raises(ConfigError):
        override(Outer(), {"sizes": "[" + text.format(tmp_path / "executed") + "]"})
    assert not (tmp_path / "executed").exists()

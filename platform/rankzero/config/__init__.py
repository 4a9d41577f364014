"""Frozen configs: flatten them, override them, write them to YAML and back. Pure, but for `read_file`.

A config is a frozen dataclass whose fields all have defaults. A field that is itself a
config is a *group*; its fields get dotted keys, ``train.batch_size``. Those keys are the
command line's, the MLflow params' and the search space's alike. A trailing underscore in
a field's name is not part of its key: ``data_`` has the key ``data``, so that a field
may share its name with a method.
"""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rankzero.config import yaml_text
from rankzero.config.renamed import NEW_NAMES, with_new_names
from rankzero.config.values import coerce, describe_type, illegal, is_setting, render

Config = TypeVar("Config")
LONGEST_SHOWN = 200


class ConfigError(ValueError):
    """A config that cannot be: the message names the key and says what to change."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting: its dotted key, its declared type, its value."""

    key: str
    annotation: Any
    value: Any


def leaves(config: object, prefix: str = "") -> Iterator[Leaf]:
    """Yield every setting of `config`, in the order of declaration."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        key, value = prefix + field.name.rstrip("_"), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, key + ".")
        else:
            yield Leaf(key, hints[field.name], value)


def flatten(config: object) -> dict[str, Any]:
    """Return {dotted key: value} of every setting."""
    return {leaf.key: leaf.value for leaf in leaves(config)}


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy of `config` with `changes` ({dotted key: value or its text}) applied.

    This is the only way a value changes. Text is read as the field's type.
    Raises ConfigError for an unknown key, a value of the wrong type or out of range.
    """
    _reject_unknown(changes, flatten(config))
    return _override(config, changes, "")


def rendered(config: object) -> dict[str, str]:
    """Return every setting of a config as text, by dotted key: what becomes of them in MLflow."""
    return {key: render(value) for key, value in flatten(config).items()}


def to_yaml(config: object, instead: Mapping[str, str] | None = None) -> str:
    """Return `config` as YAML, nested by group; the keys of `instead` with those texts for their values."""
    return yaml_text.dump(_nested(config, instead or {}))


def from_yaml(cls: type[Config], text: str) -> Config:
    """Read what `to_yaml` wrote; keys that are missing keep their defaults."""
    return override(cls(), read_yaml(text))


def read_yaml(text: str) -> dict[str, Any]:
    """Return {dotted key: value} of what `to_yaml` wrote. Raises ConfigError for what it cannot have written."""
    try:
        loaded = yaml_text.load(text) or {}
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"expected a mapping of settings, got {type(loaded).__name__}")
    return dict(_flat_mapping(loaded))


def read_file(path: Path) -> dict[str, Any]:
    """Return {dotted key: value} of a file of settings, in UTF-8. Raises ConfigError, which names the file.

    An older version may have written the file: its names are replaced by today's.
    """
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).decode()
        return with_new_names(read_yaml(text))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): name a file of settings"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ConfigError(
            f"{path} is not UTF-8 text (byte 0x{byte:02x} in line {line}): save it as UTF-8"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def check_types(cls: Any, prefix: str = "") -> None:
    """Raise TypeError where a setting's declared type is none that `coerce` knows."""
    for name, annotation in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(annotation):
            check_types(annotation, f"{prefix}{name}.")
        elif typing.get_origin(annotation) is not ClassVar and not is_setting(annotation):
            raise TypeError(f"{prefix}{name}: {illegal(annotation)}")


def parse_assignments(words: Iterable[str]) -> dict[str, str]:
    """Read the command line's ``key=value`` words; a later one wins."""
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{_shown(word)} is not of the form key=value")
        pairs[key.strip()] = value
    return pairs


def _reject_unknown(changes: Iterable[str], known: Mapping[str, Any]) -> None:
    for key in changes:
        if key in NEW_NAMES and NEW_NAMES[key] in known:
            raise ConfigError(f"{key} is now {NEW_NAMES[key]}: use the new name")
        if key not in known:
            raise ConfigError(f"unknown key {_shown(key)}{_suggestion(key[:LONGEST_SHOWN], known)}")


def _suggestion(key: str, known: Iterable[str]) -> str:
    group = [name for name in known if name.startswith(key + ".")]
    if group:
        return f": it is a group; set one of {', '.join(group)}"
    known = list(known)
    near = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = (
        near
        or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        or _nearest_last_part(key, known)
    )
    return f"; did you mean {near[0]!r}?" if near else f"; the keys are {', '.join(known)}"


def _nearest_last_part(key: str, known: list[str]) -> list[str]:
    last_parts = {name.rpartition(".")[2]: name for name in known}
    near = difflib.get_close_matches(key.rpartition(".")[2], last_parts, n=1, cutoff=0.6)
    return [last_parts[name] for name in near]


def _override(config: Config, changes: Mapping[str, Any], prefix: str) -> Config:
    hints = typing.get_type_hints(type(config))
    new: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        key, value = prefix + field.name.rstrip("_"), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            new[field.name] = _override(value, changes, key + ".")
        elif key in changes:
            new[field.name] = _coerce_setting(key, changes[key], hints[field.name])
    try:
        return dataclasses.replace(config, **new)  # type: ignore[type-var]
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from error


def _coerce_setting(key: str, value: Any, annotation: Any) -> Any:
    try:
        return coerce(value, annotation)
    except ValueError as error:
        raise ConfigError(
            f"{key}: expected {describe_type(annotation)}, got {_shown(value)}"
        ) from error


def _shown(value: Any) -> str:
    """Return a value as a message may show it: its beginning, where it is long."""
    try:
        text = render(value)
    except (
        ValueError,
        TypeError,
    ):  # a number of more digits than Python writes, a list of what JSON has no word for
        text = f"<{type(value).__name__}>"
    return (
        repr(text)
        if len(text) <= LONGEST_SHOWN
        else f"{text[:LONGEST_SHOWN]!r}… of {len(text):,} characters"
    )


def _nested(config: object, instead: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        name, value = field.name.rstrip("_"), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = _nested(value, instead, f"{prefix}{name}.")
        value = instead.get(prefix + name, value)
        nested[name] = list(value) if isinstance(value, tuple) else value
    return nested


def _flat_mapping(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from _flat_mapping(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

"""Frozen configs: flatten, override, write to YAML, read back. Only `read_file` is not pure.

A config is a frozen dataclass whose fields all have defaults. A field that is itself a config is
a *group*: its fields get dotted keys, such as ``train.batch_size``. The command line, MLflow's
params and a search space use the same keys. A trailing underscore in a field's name is not part
of its key: ``data_`` has the key ``data``, so a field may share its name with a method.
"""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rankzero.config import yaml_text
from rankzero.config.renamed import NEW_NAMES, with_new_names
from rankzero.config.values import coerce, describe_type, is_setting_type, render, unsupported_type

Config = TypeVar("Config")
_LONGEST_SHOWN = 200
_CLOSE = 0.75
"""How similar a key must be to be named as meant. Below that, a hint misleads."""
# Resolving the types takes longer than all else that flattens a config.
_type_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


class ConfigError(ValueError):
    """A wrong setting. The message names the key and the change that mends it."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting: its dotted key, its declared type, its value."""

    key: str
    annotation: Any
    value: Any


def leaves(config: object, prefix: str = "") -> Iterator[Leaf]:
    """Yield every setting of `config`, in the order of declaration."""
    # Modules with `from __future__ import annotations` hold the types as text.
    hints = _type_hints(type(config))
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        key, value = prefix + field.name.rstrip("_"), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, key + ".")
        else:
            yield Leaf(key, hints[field.name], value)


def flatten(config: object) -> dict[str, Any]:
    """Return {dotted key: value} of every setting."""
    return {leaf.key: leaf.value for leaf in leaves(config)}


def checked(config: Config) -> Config:
    """Return a config whose values have their types. Raises ConfigError for one that does not fit.

    For what nobody has read as text: the values that a class gives.
    """
    return _override(config, {}, "", every=True)


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy of `config` with `changes` ({dotted key: value or its text}) applied.

    Text is read as the field's type. Raises ConfigError for an unknown key, and for a value of the
    wrong type or out of range.
    """
    known = flatten(config)
    for key in changes:
        if NEW_NAMES.get(key) in known:
            raise ConfigError(f"{key} is now {NEW_NAMES[key]}: use the new name")
        group = [name for name in known if name.startswith(key + ".")]
        if group:
            raise ConfigError(f"{_shown(key)} is a group: set one of {', '.join(group)}")
        if key not in known:
            listed = "`rankzero config EXP` lists the keys"
            advice = _untyped(config, key) or hint(key, known, listed)
            raise ConfigError(f"unknown key {_shown(key)}; {advice}")
    return _override(config, changes, "")


def stale(config: object, changes: Mapping[str, Any]) -> str | None:
    """Return a setting that `__post_init__` computes from `changes`, and that would not follow."""
    if not changes:
        return None
    try:
        made = override(config, changes)
        values = flatten(made)
        both = _built_twice(config, {key: values[key] for key in changes})
        kept, old, new = map(rendered, (made, *both))
    except Exception:  # of the user's class, or a wrong value
        return None
    follow = (key for key in kept if key not in changes and old.get(key) != new.get(key))
    return next((key for key in follow if new.get(key) != kept[key]), None)


def refuse_stale(config: object, changes: Mapping[str, Any]) -> None:
    """Raise ConfigError for what `stale` finds."""
    if key := stale(config, changes):
        causes = [one for one in changes if stale(config, {one: changes[one]}) == key]
        raise ConfigError(
            f"{key} follows from {' or '.join(causes or changes)} in __post_init__, and would keep "
            f"its value: make it a functools.cached_property, or add {key}=VALUE"
        )


def rendered(config: object) -> dict[str, str]:
    """Return {dotted key: text} of every setting, as MLflow gets them."""
    return {key: render(value) for key, value in flatten(config).items()}


def to_yaml(config: object, instead: Mapping[str, str] | None = None) -> str:
    """Return `config` as YAML, nested by group. `instead` replaces the values of its keys."""
    nested: dict[str, Any] = {}
    for leaf in leaves(config):
        *groups, name = leaf.key.split(".")
        value = (instead or {}).get(leaf.key, leaf.value)
        # The config of an own loop may have values that no setting has, such as a list.
        if not _is_plain(value) and is_setting_type(leaf.annotation):
            value = _read(leaf.key, value, leaf.annotation)
        place = functools.reduce(lambda outer, group: outer.setdefault(group, {}), groups, nested)
        # YAML has no tuples.
        place[name] = list(value) if isinstance(value, tuple) else value
    return yaml_text.dump(nested)


def from_yaml(cls: type[Config], text: str) -> Config:
    """Read what `to_yaml` wrote. Missing keys keep their defaults."""
    return override(cls(), read_yaml(text))


def read_yaml(text: str) -> dict[str, Any]:
    """Return {dotted key: value} of what `to_yaml` wrote. Raises ConfigError for other text."""
    try:
        loaded = yaml_text.load(text) or {}
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"expected lines of `key: value`, got a {type(loaded).__name__}")
    return dict(dotted(loaded))


def read_file(path: Path) -> dict[str, Any]:
    """Return {dotted key: value} of a settings file. Raises ConfigError, which names the file.

    An older version may have written the file, so old names of settings become new ones.
    """
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).decode()
        return with_new_names(read_yaml(text))
    except OSError as error:
        why = error.strerror
        raise ConfigError(f"{path} cannot be read ({why}): give a settings file") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ConfigError(
            f"{path} is not UTF-8 text (byte 0x{byte:02x} in line {line}): save it as UTF-8"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def check_types(cls: Any, prefix: str = "") -> None:
    """Raise TypeError if a setting's declared type is not one that `coerce` knows."""
    for name, annotation in _type_hints(cls).items():
        if dataclasses.is_dataclass(annotation):
            check_types(annotation, f"{prefix}{name}.")
        elif typing.get_origin(annotation) is not ClassVar and not is_setting_type(annotation):
            raise TypeError(f"{prefix}{name}: {unsupported_type(annotation)}")


def parse_assignments(words: Iterable[str]) -> dict[str, str]:
    """Return {key: value} of the command line's ``key=value`` words. The last one counts."""
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            fix = "write key=value, such as train.epochs=5"
            raise ConfigError(f"{_shown(word)} is not a setting: {fix}")
        pairs[key.strip()] = value
    return pairs


def hint(key: str, known: Iterable[str], otherwise: str) -> str:
    """Return the keys that the user may have meant, at most three, or `otherwise`."""
    key = key[:_LONGEST_SHOWN]
    *_, end = re.split("[./]", key)
    ends = {name: re.split("[./]", name)[-1] for name in known}
    close_ends = difflib.get_close_matches(end, ends.values(), 1, _CLOSE)
    near = (
        [name for name in ends if ends[name] == end]
        or difflib.get_close_matches(key, ends, 1, _CLOSE)
        or [name for name in ends if ends[name] in close_ends]
    )
    return f"did you mean {' or '.join(map(repr, near[:3]))}?" if near else otherwise


def _untyped(config: object, key: str) -> str | None:
    """Return the advice for an attribute that a class gives a value and no type, or None."""
    value = getattr(type(config), key, None)
    # With a type, it is a ClassVar.
    if key in _type_hints(type(config)) or not isinstance(value, (bool, int, float, str)):
        return None
    return f"write `{key}: {type(value).__name__} = {value!r}` in the class to make it a setting"


def _built_twice(
    config: Config, changes: Mapping[str, Any], prefix: str = ""
) -> tuple[Config, Config]:
    """Return the config as its class makes it of what it does not give itself: before, after."""
    cls, fields = type(config), dataclasses.fields(config)  # type: ignore[arg-type]
    default, values = cls(), {one.name: getattr(config, one.name) for one in fields if one.init}
    given = {key: value for key, value in values.items() if value != getattr(default, key)}
    computed = {one.name for one in fields if one.default != getattr(default, one.name)}
    usual = cls(**{key: value for key, value in given.items() if key not in computed})
    for name in computed & given.keys():
        if given[name] == getattr(usual, name):
            del given[name]
    old, new = dict(given), dict(given)
    for name, value in values.items():
        key = prefix + name.rstrip("_")
        if key in changes:
            new[name] = changes[key]
        elif any(one.startswith(key + ".") for one in changes):
            old[name], new[name] = _built_twice(value, changes, key + ".")
    return cls(**old), cls(**new)


def _override(
    config: Config, changes: Mapping[str, Any], prefix: str, every: bool = False
) -> Config:
    hints = _type_hints(type(config))
    new: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        key, value = prefix + field.name.rstrip("_"), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            new[field.name] = _override(value, changes, key + ".", every)
            continue
        if key not in changes and not every:
            continue
        made = _read(key, changes.get(key, value), hints[field.name])
        # An integer that the class gives a float stays one: older studies have its text.
        if key in changes or made != value or not _is_plain(value):
            new[field.name] = made
    try:
        return dataclasses.replace(config, **new)  # type: ignore[type-var]
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from error


def _read(key: str, value: Any, kind: Any) -> Any:
    """Return a setting's value, which may be text, as its type. Raises ConfigError."""
    try:
        return coerce(value, kind)
    except ValueError as error:
        expected = f"expected {describe_type(kind)}, got {_shown(value)}"
        raise ConfigError(f"{key}: {expected}") from error


def _is_plain(value: object) -> bool:
    """Return whether YAML can hold the value: a NumPy number and an enum are no plain values."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _shown(value: Any) -> str:
    """Return a value as Python writes it, of a long one the beginning."""
    try:
        text, show = (value, repr) if isinstance(value, str) else (repr(value), str)
    except ValueError:
        # An integer of more digits than Python writes.
        text, show = f"<{type(value).__name__}>", str
    if len(text) <= _LONGEST_SHOWN:
        return show(text)
    return f"{show(text[:_LONGEST_SHOWN])}… of {len(text):,} characters"


def dotted(nested: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a nested mapping."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

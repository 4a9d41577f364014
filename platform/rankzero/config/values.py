"""The value of one setting: to text, and from text by its declared type. Pure."""

from __future__ import annotations

import json
import math
import types
import typing
from typing import Any, Literal, Union

from rankzero.config import yaml_text

NONE_WORDS = {"none", "null", "~"}
_LARGEST_EXACT = 2.0**53  # A float holds every integer up to here.
_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True)
_BOOLEANS |= dict.fromkeys(("false", "no", "off", "0"), False)


def render(value: object) -> str:
    """Return `value` as the text that `override` reads back to the same value."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str():
            return str.__str__(value)  # an enum's own is its name
        case int():
            return int.__repr__(value)
        case tuple():
            return json.dumps(value, ensure_ascii=False, default=str)
        case _:
            return str(value)


def describe_type(annotation: Any) -> str:
    """Return a type as text: ``int``, ``fp32 | bf16``, ``int | none``."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(render(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " | ".join(describe_type(arg) for arg in args)
    if origin is tuple and args[-1:] == (Ellipsis,):
        return f"list of {describe_type(args[0])}"
    if origin is tuple:
        return f"[{', '.join(describe_type(arg) for arg in args)}]"
    return "none" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def coerce(value: Any, annotation: Any) -> Any:
    """Return `value`, which may be text, as the type `annotation`.

    Raises ValueError if it is not of that type. Never rounds, truncates or guesses.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _coerce_union(value, args)
    if origin is Literal:
        for option in args:
            is_same = type(option) is type(value) and option == value
            if is_same or (isinstance(value, str) and render(option) == value):
                return option
        raise ValueError("not one of the choices")
    if origin is tuple:
        return _coerce_tuple(value, args)
    try:
        return _COERCE_SCALAR[annotation](value)
    except KeyError:
        raise TypeError(unsupported_type(annotation)) from None


def choices(annotation: Any) -> list[Any]:
    """Return the values that a type lists as a Literal, also as a part of it."""
    args = typing.get_args(annotation)
    is_literal = typing.get_origin(annotation) is Literal
    return [*args] if is_literal else [one for arg in args for one in choices(arg)]


def is_setting_type(annotation: Any) -> bool:
    """Return whether a setting may have this type: one with a form as text."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return all(is_setting_type(arg) for arg in args)
    if origin is tuple:
        return all(is_setting_type(arg) for arg in args if arg is not Ellipsis)
    # YAML cannot hold a member of an enum.
    is_plain = origin is Literal and all(type(arg) in _COERCE_SCALAR for arg in args)
    return is_plain or annotation in _COERCE_SCALAR


def unsupported_type(annotation: Any) -> str:
    """Return the error that no setting can have this type, and which types it can have."""
    return (
        f"a setting cannot have the type {describe_type(annotation)}; use int, float, bool, str, "
        "a Literal or a tuple of these, any of these | None, or a frozen dataclass of settings"
    )


def _coerce_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    try:
        return _BOOLEANS[value.strip().lower()]
    except (KeyError, AttributeError):
        raise ValueError("not a boolean") from None


def _coerce_int(value: Any) -> int:
    # bool is a subclass of int, and `epochs=true` is a mistake.
    if isinstance(value, bool):
        raise ValueError("not an integer")
    if isinstance(value, float) and not (value.is_integer() and abs(value) <= _LARGEST_EXACT):
        raise ValueError("not an integer, or one that a float cannot hold exactly")
    try:
        number = int(value)
    except ValueError:
        return _coerce_int(float(value))  # Such as 1e5.
    except (OverflowError, TypeError) as error:
        raise ValueError("not an integer") from error
    if not isinstance(value, str) and number != value:
        raise ValueError("not an integer")
    str(number)  # Raises ValueError for more digits than Python writes.
    return number


def _coerce_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("not a number")
    try:
        number = float(value)
    except (OverflowError, TypeError) as error:
        raise ValueError("not a number") from error
    if number != number or (
        isinstance(value, str) and math.isinf(number) and "inf" not in value.lower()
    ):
        raise ValueError("not a number that a float can hold")
    return number


def _coerce_str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")
    value.encode()  # Raises ValueError for half a surrogate pair, which no file can hold.
    return str.__str__(value)


def _coerce_none(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value.strip().lower() in NONE_WORDS):
        raise ValueError("not none")


_COERCE_SCALAR: dict[Any, Any] = {
    bool: _coerce_bool,
    int: _coerce_int,
    float: _coerce_float,
    str: _coerce_str,
    type(None): _coerce_none,
}


def _coerce_union(value: Any, options: tuple[Any, ...]) -> Any:
    if value is None and type(None) in options:
        return None
    # A value that has one of the types keeps it. Text takes the narrowest type that it fits: none
    # before numbers, and str last.
    exact = [option for option in options if type(value) is option and option is not str]
    narrow = [option for option in (type(None), int, float) if option in options]
    others = [option for option in options if option not in narrow and option is not str]
    for option in (*exact, *narrow, *others, *({str} & set(options))):
        try:
            return coerce(value, option)
        except ValueError:
            continue
    raise ValueError("no type fits")


def _coerce_tuple(value: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, str):
        text = value.strip()
        value = [item.strip() for item in text.split(",")] if text else []
        if text.startswith("["):
            # `render` writes JSON, and YAML reads some characters of JSON differently.
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                value = yaml_text.load(text)
    if not isinstance(value, (list, tuple)):
        raise ValueError("not a list")
    if args[-1:] == (Ellipsis,):
        args = args[:1] * len(value)
    return tuple(coerce(item, arg) for item, arg in zip(value, args, strict=True))

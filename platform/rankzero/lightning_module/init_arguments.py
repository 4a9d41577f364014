"""The arguments of a class's `__init__` as fields of an experiment. Pure."""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rankzero.config.values import is_setting_type
from rankzero.errors import UserError
from rankzero.experiment import Experiment

_LEARNING_RATES = ("lr", "learning_rate")
BATCH_SIZE = "batch_size"
# Every experiment has these already.
_NO_FIELDS = {"train", "goal", "search", *_LEARNING_RATES}
# Names of an experiment that a field would hide, `source` among those of a `LightningModule`'s.
_TAKEN = {*vars(Experiment), "source"}


def parameters(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the arguments of a class by name, without ``*args`` and ``**kwargs``."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {parameter.name: parameter for parameter in found if parameter.kind not in several}


def _defaults_of(cls: type[Any]) -> dict[str, Any]:
    """Return {argument: default}. Raises UserError for an argument without a default."""
    found = {name: one.default for name, one in parameters(cls).items() if name != BATCH_SIZE}
    missing = [name for name, default in found.items() if default is inspect.Parameter.empty]
    if missing:
        raise UserError(
            f"{cls.__name__}.__init__: give {', '.join(missing)} a default value, so that it can "
            "be a setting"
        )
    return found


def fields_of(classes: Iterable[type[Any]]) -> dict[str, tuple[Any, Any]]:
    """Return {name: (type, default)} of the arguments of all `classes` that can be settings.

    An argument whose type cannot be written as text keeps its default and is not a setting. The
    learning rate is not included: every experiment has it, as `lr`.
    """
    fields: dict[str, tuple[Any, Any]] = {}
    for cls in classes:
        hints: dict[str, Any] = {}
        # A type may be imported for type checkers only. Then the default's type must do.
        with contextlib.suppress(NameError):
            hints = typing.get_type_hints(cls.__init__)
        for name, default in _defaults_of(cls).items():
            kind = hints.get(name, type(default))
            if default is None:  # as in ``hidden: int = None``
                kind = typing.Optional[kind]  # noqa: UP045 (a type may have no |)
            if name not in _NO_FIELDS and is_setting_type(kind):
                fields.setdefault(_field_of(name), (kind, default))
    return fields


def clash_of(classes: Sequence[type[Any]]) -> str:
    """Return which setting has one default in the first class, and another in the last, or ""."""
    first, last = fields_of(classes[:1]), fields_of(classes[-1:])
    values = [(name, first[name][1], last[name][1]) for name in first if name in last]
    for name, one, other in values:
        if one != other:
            places = f"{one!r} in {classes[0].__name__} and {other!r} in {classes[-1].__name__}"
            return f"{name} is {places}: give both one default, or rename one"
    return ""


def values_for(
    cls: type[Any], fields: Mapping[str, Any], rate: float, batch_size: int
) -> dict[str, Any]:
    """Return {argument: value} for a class. An argument that is no setting keeps its default.

    `fields`: the values of the experiment's fields, of which its own are not for the user's class.
    """
    # A class may call its learning rate either name, and an experiment has only `lr`.
    special = {**dict.fromkeys(_LEARNING_RATES, rate), BATCH_SIZE: batch_size}
    arguments = parameters(cls)
    settings = {
        name: fields[_field_of(name)]
        for name in arguments
        if name not in _NO_FIELDS and _field_of(name) in fields
    }
    return settings | {name: special[name] for name in arguments if name in special}


def _field_of(argument: str) -> str:
    # The field must not hide a name of the experiment. Its key is the same.
    return f"{argument}_" if argument in _TAKEN else argument


def learning_rate(cls: type[Any], refusals: Iterable[str] = ()) -> float:
    """Return the default of the learning rate.

    Raises UserError if the class takes none, with the first of its other `refusals` if it has one.
    """
    defaults = _defaults_of(cls)
    for name in _LEARNING_RATES:
        if isinstance(defaults.get(name), (int, float)):
            return float(defaults[name])
    raise UserError(
        next(filter(None, refusals), "")
        or f"{cls.__name__}.__init__ has no learning rate: give it an argument `lr`, and use that "
        "in configure_optimizers, or train with Lightning's own Trainer"
    )

"""A user's config as the params of a run. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from argparse import Namespace
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rankzero.config import ConfigError, dotted
from rankzero.config.values import render
from rankzero.integrations.own_loop.values import Tell, read_pairs
from rankzero.launch.failures import reason


def params_of(config: object, tell: Tell = lambda *_: None) -> dict[str, str]:
    """Return a config's settings as text, by dotted key. None has none.

    `config`: a mapping (also OmegaConf's), a dataclass, an `argparse.Namespace`, or any object or
    class with attributes. Raises ConfigError for anything else. `tell`: gets each setting that is
    lost, or that there is none.
    """
    try:
        found = {} if config is None else _mapping(config)
        if found is None and (found := _attributes(config)) == {}:
            kind = type(config).__name__
            tell("config", f"the config {kind} has no attributes to log: pass its settings as dict")
        if found is not None:
            return read_pairs(dotted(_nested(found)), _text, "param", tell)
    except Exception as error:  # such as OmegaConf's, for a setting without a value
        raise ConfigError(f"the config cannot be read: {reason(error)}") from error
    raise ConfigError(
        f"a config must be a mapping, a dataclass or an object with attributes, got "
        f"{type(config).__name__}"
    )


def _text(value: Any) -> str:
    """Return a setting as text, a tensor without dimensions as its number."""
    torch = sys.modules.get("torch")
    is_number = torch is not None and isinstance(value, torch.Tensor) and value.dim() == 0
    # Reading a DTensor is a collective: rank 0 would wait for the others.
    return render(value.item() if is_number and not hasattr(value, "full_tensor") else value)


def _nested(settings: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the settings with a mapping for each group of settings."""
    found = {}
    for key, value in settings.items():
        group = _mapping(value)
        # A group without settings is a setting, as an empty list is.
        found[key] = value if group is None else _nested(group) or "{}"
    return found


def _mapping(config: object) -> Mapping[Any, Any] | None:
    if isinstance(config, Mapping):
        return config
    fields = getattr(type(config), "__attrs_attrs__", None)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = dataclasses.fields(config)
    if fields is not None:
        return {field.name: getattr(config, field.name) for field in fields}
    return vars(config) if isinstance(config, (Namespace, SimpleNamespace)) else None


def _attributes(config: Any) -> Mapping[Any, Any] | None:
    """Return an object's or a class's attributes, those of its classes included."""
    is_class = isinstance(config, type)
    # As of ml_collections, of named tuples and of pydantic. Others may need an argument.
    for name in () if is_class else ("to_dict", "_asdict", "model_dump"):
        with contextlib.suppress(Exception):
            return dict(getattr(type(config), name)(config))
    if not hasattr(config, "__dict__"):
        return None
    found = dict[str, Any]()
    for kind in reversed((config if is_class else type(config)).__mro__):
        found |= vars(kind)
    return {
        key: value
        for key, value in {**found, **vars(config)}.items()
        # Methods and properties are no settings.
        if not (key.startswith("_") or callable(value) or hasattr(type(value), "__get__"))
    }

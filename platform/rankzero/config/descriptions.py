"""Reads what each setting is from the docstrings below the fields, in the source."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import textwrap


def descriptions(config: object, prefix: str = "") -> dict[str, str]:
    """Return {dotted key: description} of the settings that have one."""
    texts, found = dict[str, str](), dict[str, str]()
    for cls in reversed(type(config).__mro__):
        texts |= _docstrings(cls)
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        key, group = prefix + field.name.rstrip("_"), getattr(config, field.name)
        if dataclasses.is_dataclass(group):
            found |= descriptions(group, f"{key}.")
        elif field.name in texts:
            found[key] = texts[field.name]
    return found


def _docstrings(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a class, on one line."""
    found = {}
    # A class of a notebook or a zip has no source. Then its settings have no description.
    with contextlib.suppress(OSError, TypeError, ValueError, SyntaxError):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        for field, below in itertools.pairwise(getattr(tree, "body", [])):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found

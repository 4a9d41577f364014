"""What pictures are called: the names of classes, and those of an experiment's own images. Runs no user's code."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any

LONGEST = 60  # bytes of a picture's name: it becomes a file's
MOST_CLASSES = 4096
DEEPEST = 16  # data sets in data sets


def class_names(dataset: Any) -> list[str]:
    """Return the names of a data set's classes, also of one that it is a part of; empty where it has none.

    Properties are left alone: one may read the whole data set. Of synonyms (torchvision's ImageNet) the first counts.
    """
    with contextlib.suppress(Exception):  # a user's class may do anything when it is asked
        for _ in range(DEEPEST):
            names = _held(dataset, "classes")
            if isinstance(names, (list, tuple)) and names:
                return [_first(name) for name in names] if len(names) <= MOST_CLASSES else []
            dataset = _held(dataset, "dataset")
    return []


def apart(names: Iterable[Any]) -> list[str]:
    """Return names of at most `LONGEST` bytes, each once: the second ``x`` is ``x (2)``."""
    found: list[str] = []
    for name in map(str, names):
        title, number = _cut(name), 1
        while title in found:
            number += 1
            title = _cut(name, f" ({number})")
        found.append(title)
    return found


def _held(thing: Any, name: str) -> Any:
    """Return an attribute that is there without asking for it; None for what a class would compute."""
    value = inspect.getattr_static(thing, name, None)
    return None if hasattr(type(value), "__get__") else value


def _first(name: Any) -> str:
    return str(name[0] if isinstance(name, (list, tuple)) and name else name)


def _cut(name: str, end: str = "") -> str:
    return name.encode(errors="replace")[: LONGEST - len(end)].decode(errors="ignore") + end

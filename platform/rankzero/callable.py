"""A package that is a function, too: training lives in ``rankzero.train``, and ``rankzero.train(Digits())`` trains."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

HOME = "rankzero.api.launching"


class CallablePackage(ModuleType):
    """The function has the package's name, and is imported when it is called."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(HOME), self.__name__.rpartition(".")[2])(*arguments, **options)

"""RankZero: tracked PyTorch training that never waits for its tracker.

A public name is imported when it is first used, so `import rankzero` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankzero.api.commands import open_ui as open_ui
    from rankzero.api.commands import repeat as repeat
    from rankzero.api.commands import search as search
    from rankzero.api.commands import train as train
    from rankzero.api.results import comparison as comparison
    from rankzero.api.results import run as run
    from rankzero.api.results import runs as runs
    from rankzero.config import ConfigError as ConfigError
    from rankzero.config import flatten as flatten
    from rankzero.config import from_yaml as from_yaml
    from rankzero.config import override as override
    from rankzero.config import to_yaml as to_yaml
    from rankzero.errors import RunFailed as RunFailed
    from rankzero.errors import UserError as UserError
    from rankzero.experiment import Experiment as Experiment
    from rankzero.experiment import Goal as Goal
    from rankzero.experiment import Train as Train
    from rankzero.integrations.own_loop.track import track as track
    from rankzero.ratio import Ratio as Ratio
    from rankzero.search_ranges import Choice as Choice
    from rankzero.search_ranges import Integer as Integer
    from rankzero.search_ranges import LogUniform as LogUniform
    from rankzero.search_ranges import Uniform as Uniform
    from rankzero.training_position import Progress as Progress

__version__ = "0.1.0"

_HOMES = {
    "rankzero.api.commands": ("open_ui", "repeat", "search", "train"),
    "rankzero.api.results": ("comparison", "run", "runs"),
    "rankzero.config": ("ConfigError", "flatten", "from_yaml", "override", "to_yaml"),
    "rankzero.errors": ("RunFailed", "UserError"),
    "rankzero.experiment": ("Experiment", "Goal", "Train"),
    "rankzero.training_position": ("Progress",),
    "rankzero.ratio": ("Ratio",),
    "rankzero.search_ranges": ("Choice", "Integer", "LogUniform", "Uniform"),
    "rankzero.integrations.own_loop.track": ("track",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [  # noqa: PLE0604 - The names stay in one place.
    "__version__",
    *sorted(_HOME_OF),
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rankzero' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__

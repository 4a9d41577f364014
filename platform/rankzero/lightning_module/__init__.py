"""Classes of other frameworks, taken as experiments: for a file that has no `Experiment`, but a `LightningModule`.

Nothing here imports a framework before the user's file has.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from rankzero.experiment import Experiment

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""Lightning's two names for itself."""


def experiments_in(module: ModuleType) -> dict[str, type[Experiment]]:
    """Return the module's own Lightning modules, each as an experiment, by class name.

    Raises UserError for one that asks for what RankZero's loop does not do.
    """
    modules = _own(module, "LightningModule")
    if not modules:
        return {}
    from rankzero.lightning_module.experiment import adopt

    data_modules = list(_own(module, "LightningDataModule").values())
    return {name: adopt(found, data_modules, vars(module)) for name, found in modules.items()}


def _own(module: ModuleType, base: str) -> dict[str, type[Any]]:
    """Return the classes that `module` defines and that derive from Lightning's `base`; of several, the leaves."""
    found = {
        value.__name__: value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and _derives(value, base)
    }
    return {
        name: cls
        for name, cls in found.items()
        if not any(cls in other.__mro__[1:] for other in found.values())
    }


def _derives(cls: type, base: str) -> bool:
    return any(
        parent.__name__ == base and parent.__module__.startswith(LIGHTNING)
        for parent in cls.__mro__[1:]
    )

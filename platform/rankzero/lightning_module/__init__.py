"""A `LightningModule` as an experiment, for a file that defines no `Experiment`.

Nothing here imports Lightning unless the user's file has done so.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from rankzero.experiment import Experiment

IGNORED = "_ignored_hooks"
"""The attribute of an experiment's class with the text of `ignored_hooks`."""
# One for each module, so that `is_outdated` compares with the file as it was at the first call.
_adopted: dict[type[Any], type[Experiment]] = {}
_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")  # Lightning has two package names.


def modules_in(module: ModuleType) -> dict[str, type[Any]]:
    """Return each `LightningModule` that a file defines, by class name.

    One without a `training_step` is a part of others, unless there are no others.
    """
    found = _defined_in(module, "LightningModule")
    trained = {
        name: cls
        for name, cls in found.items()
        if not f"{cls.training_step.__module__}.".startswith(_LIGHTNING)
    }
    return trained or found


def as_experiment(chosen: type[Any], module: ModuleType) -> type[Experiment]:
    """Return a file's `LightningModule` as an experiment.

    Raises UserError for a module without data.
    """
    # The import needs torch, which a file without a LightningModule may not have loaded.
    from rankzero.lightning_module.experiment import adopt

    data_modules = list(_defined_in(module, "LightningDataModule").values())
    if chosen not in _adopted:
        _adopted[chosen] = adopt(chosen, data_modules, vars(module))
    return _adopted[chosen]


def ignored_hooks(experiment: type[Experiment]) -> str:
    """Return which hooks the LightningModule that became an experiment defines in vain, or ""."""
    return str(getattr(experiment, IGNORED, ""))


def _defined_in(module: ModuleType, base: str) -> dict[str, type[Any]]:
    """Return the classes of a file that derive from Lightning's `base`, without base classes."""
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    parents = {parent for cls in own for parent in cls.__mro__[1:]}
    of_lightning = {
        one
        for one in parents
        if one.__name__ == base and f"{one.__module__}.".startswith(_LIGHTNING)
    }
    return {
        cls.__name__: cls for cls in own if cls not in parents and of_lightning & {*cls.__mro__}
    }

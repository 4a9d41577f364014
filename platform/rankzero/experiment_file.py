"""Load a user's file: ``path.py``, or ``path.py:Class`` if it defines several experiments."""

from __future__ import annotations

import importlib.util
import sys
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.lightning_module import experiments_in

# A file that calls `rankzero.train` at import would start itself again in each training process.
# `is_loading` finds that out. A ContextVar, so that only the importing thread sees it.
_loading: ContextVar[bool] = ContextVar("loading", default=False)


def load(reference: str) -> type[Experiment]:
    """Return the Experiment class of a user's file, or the experiment that its LightningModule is.

    Raises UserError. Exceptions of the file itself pass through.
    """
    path, name = split(reference)
    module = _import(path)
    found = {
        value.__name__: value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Experiment)
        and value.__module__ == module.__name__
    }
    found = found or experiments_in(module)
    if not found:
        raise UserError(
            f"{path} defines no Experiment: add a class that derives from rankzero.Experiment, "
            "or a LightningModule"
        )
    if name is not None:
        if name not in found:
            raise UserError(f"{path} has no experiment {name!r}, only {', '.join(found)}")
        return found[name]
    leaves = [
        cls for cls in found.values() if not any(cls in one.__mro__[1:] for one in found.values())
    ]
    if len(leaves) > 1:
        choices = " or ".join(f"{path.name}:{cls.__name__}" for cls in leaves)
        raise UserError(f"{path} defines several experiments: name one, {choices}")
    return leaves[0]


def is_loading() -> bool:
    """Return whether this process is importing a user's file now."""
    return _loading.get()


def split(reference: str) -> tuple[Path, str | None]:
    """Return the file and the class of a reference. Raises UserError if there is no such file."""
    file, colon, name = reference.rpartition(":")
    if not colon or name.endswith(".py"):
        file, name = reference, ""
    path = Path(file).absolute()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(
            f"no such experiment file: {file} (expected a Python file such as "
            "experiments/digits.py)"
        )
    return path, name or None


def _import(path: Path) -> ModuleType:
    """Import the file under its own name, with its folder importable, as a script would be."""
    loaded = sys.modules.get(path.stem)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        if file is not None and Path(file).exists() and path.samefile(file):
            return loaded
        raise UserError(f"{path}: a module named {path.stem!r} is loaded already; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Both stay for the life of the process. The file may import its neighbours late, and a loader
    # process that is started afresh unpickles the file's classes by this module name.
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    token = _loading.set(True)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        sys.path.remove(str(path.parent))
        raise
    finally:
        _loading.reset(token)
    return module

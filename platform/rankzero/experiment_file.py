"""Loading the user's file: ``path.py``, or ``path.py:Class`` where it defines several experiments."""

from __future__ import annotations

import importlib.util
import sys
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.lightning_module import experiments_in

_loading: ContextVar[bool] = ContextVar("loading", default=False)


def load(reference: str) -> type[Experiment]:
    """Return the Experiment class of a user's file, or the experiment that its LightningModule is.

    Raises UserError; what the file itself raises passes through.
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
    return _choose(found or experiments_in(module), name, path)


def is_loading() -> bool:
    """Tell whether this process is importing a user's file now."""
    return _loading.get()


def split(reference: str) -> tuple[Path, str | None]:
    """Return the file and the class of a reference. Raises UserError where there is no such file."""
    file, colon, name = reference.rpartition(":")
    if not colon or name.endswith(".py"):
        file, name = reference, ""
    path = Path(file).absolute()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(
            f"no such experiment file: {file} (expected a Python file such as experiments/digits.py)"
        )
    return path, name or None


def _choose(found: dict[str, type[Experiment]], name: str | None, path: Path) -> type[Experiment]:
    if not found:
        raise UserError(
            f"{path} defines no Experiment: add a class that derives from rankzero.Experiment, or a LightningModule"
        )
    if name is not None:
        if name not in found:
            raise UserError(f"{path} has no experiment {name!r}, only {', '.join(found)}")
        return found[name]
    leaves = [
        cls
        for cls in found.values()
        if not any(cls in other.__mro__[1:] for other in found.values())
    ]
    if len(leaves) > 1:
        choices = " or ".join(f"{path.name}:{cls.__name__}" for cls in leaves)
        raise UserError(f"{path} defines several experiments: say which, {choices}")
    return leaves[0]


def _import(path: Path) -> ModuleType:
    """Import the file under its own name, with its folder importable, as a script would be.

    So loader processes that start afresh can import the classes it defines.
    """
    loaded = sys.modules.get(path.stem)
    if loaded is not None:
        if _is_of(loaded, path):
            return loaded
        raise UserError(f"{path}: a module named {path.stem!r} is loaded already; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    loading = _loading.set(True)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        sys.path.remove(str(path.parent))
        raise
    finally:
        _loading.reset(loading)
    return module


def _is_of(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).exists() and path.samefile(file)

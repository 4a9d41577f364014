"""Load a user's file: ``path.py``, or ``path.py:Class`` if it defines several experiments."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import multiprocessing
import sys
import sysconfig
import urllib.parse
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.lightning_module import as_experiment, modules_in

CODE = "rankzero.code."
"""The tags that `code_tags` returns begin with it."""
# A file that calls `rankzero.train` at import would start itself again in each training process.
# `is_loading` finds that out. A ContextVar, so that only the importing thread sees it.
_loading: ContextVar[bool] = ContextVar("loading", default=False)
_folders: set[Path] = set()
"""The folders of the files that this process has loaded, which are importable."""
__path__: list[str] = []  # Modules can be below this one: see `_FilesByPath`.


def load(reference: str) -> type[Experiment]:
    """Return the Experiment class of a user's file, or the experiment that its LightningModule is.

    Raises UserError. Exceptions of the file itself pass through.
    """
    path, name = split(reference)
    module = _import(path)
    found: dict[str, type[Any]] = {
        value.__name__: value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Experiment)
        and value.__module__ == module.__name__
    }
    found = found or modules_in(module)
    if not found:
        raise UserError(
            f"{path} defines no Experiment: add a class that derives from rankzero.Experiment, "
            "or a LightningModule"
        )
    chosen = _chosen(found, path, name)
    return chosen if issubclass(chosen, Experiment) else as_experiment(chosen, module)


def _chosen(found: dict[str, type[Any]], path: Path, name: str | None) -> type[Any]:
    """Return the class of this name, or the only one that no other derives from."""
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


def code(folder: Path) -> dict[str, bytes]:
    """Return the modules below a folder that this process has imported, by their path in it."""
    # Python may lie below the folder, and imports its own modules when they are needed.
    others = (sysconfig.get_path("stdlib"), Path(__file__).parent)
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    own = (Path(file) for file in files if file.endswith(".py"))
    names = sorted(one.relative_to(folder) for one in own if one.is_relative_to(folder))
    # A virtual environment may lie next to the file, too, and a module in an archive.
    return {
        name.as_posix(): (folder / name).read_bytes()
        for name in names
        if "site-packages" not in name.parts and (folder / name).is_file()
        if not any((folder / name).is_relative_to(other) for other in others)
    }


def code_tags(reference: str) -> dict[str, str]:
    """Return a digest of the imported file, and of each module that it imported from its folder."""
    parts = code(split(reference)[0].parent).items()
    return {f"{CODE}{name}": hashlib.sha256(text).hexdigest()[:16] for name, text in parts}


class _FilesByPath:
    """Finds the modules that `_import` has named by their path: also where they are unpickled."""

    @staticmethod
    def find_spec(name: str, *_others: object) -> ModuleSpec | None:
        parent, _, quoted = name.rpartition(".")
        if parent != __name__:
            return None
        return importlib.util.spec_from_file_location(name, urllib.parse.unquote(quoted))


sys.meta_path.append(_FilesByPath)


def _module_name(path: Path) -> str:
    """Return the file's own name; if another folder's experiment has it, a name by the path.

    Raises UserError if a module that is no experiment has the name.
    """
    if path.stem not in sys.modules:
        return path.stem
    other = getattr(sys.modules[path.stem], "__file__", None)
    if other is not None and Path(other).exists() and path.samefile(other):
        return path.stem
    if other is None or Path(other).absolute().parent not in _folders:
        raise UserError(f"{path}: a module named {path.stem!r} is loaded already; rename the file")
    # A name has no dots but those between a package and its modules.
    quoted = str(path.resolve()).replace("%", "%25").replace(".", "%2E")
    return f"{__name__}.{quoted}"


def _import(path: Path) -> ModuleType:
    """Import the file, with its folder importable, as a script would be; also behind a link."""
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Both stay for the life of the process. The file may import its neighbours late, and a loader
    # process that is started afresh unpickles the file's classes by this module name.
    own = {path.parent: None, path.resolve().parent: None}
    sys.path[:0] = map(str, own)
    sys.modules[name] = module
    token = _loading.set(True)
    # The file may call os.chdir. A command takes its own relative paths from its first folder. A
    # rank stays in the file's, from where `data` may read.
    is_command = multiprocessing.parent_process() is None
    try:
        with contextlib.chdir(".") if is_command else contextlib.nullcontext():
            spec.loader.exec_module(module)
        _refuse_others(module, path, own)
    except BaseException as error:
        sys.modules.pop(name, None)
        _drop_from_path(own)
        if isinstance(error, SystemExit):
            raise UserError(
                f"{path} ended the program while it was imported (exit {error.code or 0}): put "
                'what is a script, such as parse_args(), below if __name__ == "__main__":'
            ) from error
        raise
    finally:
        _loading.reset(token)
    if name != path.stem:
        # A process that is started afresh must find the first file under their common name.
        _drop_from_path(own)
        sys.path.extend(map(str, own))
    _folders.update(own)
    return module


def _drop_from_path(folders: Iterable[Path]) -> None:
    for folder in folders:
        # The user's file may have removed it.
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _refuse_others(module: ModuleType, path: Path, own: Collection[Path]) -> None:
    """Raise UserError if the file got a neighbour of another experiment instead of its own."""
    files = {name: getattr(one, "__file__", None) for name, one in list(sys.modules.items())}
    others = {
        name: here
        for name, file in files.items()
        if file and Path(file).parent in _folders.difference(own)
        for here in (folder / f"{name}.py" for folder in own)
        if here.exists() and here.resolve() != Path(file).resolve()
    }
    # Its neighbours may have got another's, too.
    users = [name for name, file in files.items() if file and Path(file).parent in own]
    for user in (module, *map(sys.modules.get, users if others else ())):
        for value in list(vars(user).values()):
            owner = "__name__" if isinstance(value, ModuleType) else "__module__"
            name = str(getattr(value, owner, None)).partition(".")[0]
            if name in others:
                raise UserError(
                    f"{others[name]} has the name of {files[name]}, which this process has loaded "
                    f"for another experiment, and {path} would get that one: rename one of the two"
                )

"""Commands that a text names, as a shell takes them: quoted, and for the right store."""

from __future__ import annotations

import shlex
from pathlib import Path

from rankzero.run_store.location import root_of


def line(root: Path | None, *words: str, program: str = "rankzero") -> str:
    """Return a command on the store in `root`.

    `root`: None in a text that MLflow keeps, because a store may be moved.
    """
    return shlex.join([program, *words]) + ("" if root is None else option(root))


def option(root: Path) -> str:
    """Return the end of a command on the store in `root`: nothing if it seeks there anyway."""
    is_default = root.absolute() == root_of(None).absolute()
    return "" if is_default else f" --dir {shlex.quote(str(root))}"

"""What pictures are drawn from, on the disk between the training and the courier: arrays in an ``.npz`` file.

Read without pickle, and no more than a bounded number of bytes, whatever a file says of itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankzero.events import PicturesTaken
from rankzero.tracking.journal import RunFolder, read_all

OURS = re.compile(r"step_\d+_\d+\.npz|\.step_\d+_\d+\.npz\.\d+")  # whole, and as they are written
MOST_BYTES = 256 << 20  # sixteen pictures of 2048 x 2048 in colour, and some
MOST_ARRAYS = 64


def write(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write the arrays, in one step. Raises ValueError where they are too large, OSError."""
    import numpy as np

    size = sum(array.nbytes for array in arrays.values())
    if size > MOST_BYTES:
        raise ValueError(f"pictures of {size >> 20} MiB are too large; at most {MOST_BYTES >> 20} MiB are kept")
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        np.savez(file, **arrays)
    temporary.replace(path)


def clear(folder: RunFolder) -> None:
    """Remove what a killed writer left: files that no event of the journal names, so that nobody will ever draw them.

    For the only writer, before it writes: a courier may be at work on those that are named. Raises nothing.
    """
    with contextlib.suppress(OSError):
        left = [] if folder.pictures.is_symlink() else sorted(folder.pictures.iterdir())
        left = [path for path in left if OURS.fullmatch(path.name)]
        named = _named(folder) if left else set()  # a journal is long; most attempts find nothing
        for path in left:
            if path.name not in named and path.is_file():
                path.unlink(missing_ok=True)


def _named(folder: RunFolder) -> set[str]:
    return {Path(event.path).name for event in read_all(folder.events) if isinstance(event, PicturesTaken)}


def read(path: Path) -> dict[str, Any]:
    """Return the arrays. Raises FileNotFoundError, and ValueError for what `write` has not written."""
    import numpy as np

    try:
        with zipfile.ZipFile(path) as stored:
            sizes = [member.file_size for member in stored.infolist()]
        if len(sizes) > MOST_ARRAYS or sum(sizes) > MOST_BYTES + (MOST_ARRAYS << 12):
            raise ValueError("it holds more than was written")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged archive fails in as many ways as there are bytes
        raise ValueError(f"{path.name} holds no pictures: {type(error).__name__}: {error}") from error

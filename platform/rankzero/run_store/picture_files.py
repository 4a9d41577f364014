"""What pictures are drawn from, on the disk between the training and the courier: arrays in an ``.npz`` file.

Read without pickle, and no more than a bounded number of bytes, whatever a file says of itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankzero.events import PicturesTaken
from rankzero.faults import is_want
from rankzero.run_store import symlinks
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all

OURS = re.compile(r"step_\d+_\d+\.npz|\.step_\d+_\d+\.npz\.\d+")  # whole, and as they are written
MOST_BYTES = 256 << 20  # sixteen pictures of 2048 x 2048 in colour, and some
MOST_ARRAYS = 64


def write(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write the arrays, in one step. Raises ValueError where they are too large, OSError."""
    import numpy as np

    size = sum(array.nbytes for array in arrays.values())
    if size > MOST_BYTES:
        raise ValueError(
            f"pictures of {size >> 20} MiB are too large; at most {MOST_BYTES >> 20} MiB are kept"
        )
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb", opener=symlinks.no_follow) as file:
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
    return {
        Path(event.path).name
        for event in read_all(folder.events)
        if isinstance(event, PicturesTaken)
    }


def read(path: Path) -> dict[str, Any]:
    """Return the arrays. Raises what the machine lacks, and ValueError for what `write` has not written.

    The latter only for what the file says: one that could not be read is not to be thrown away.
    """
    import numpy as np

    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path.name} is no file")
    try:
        with zipfile.ZipFile(path) as stored:
            sizes = [member.file_size for member in stored.infolist()]
            if len(sizes) > MOST_ARRAYS or sum(sizes) > MOST_BYTES + (MOST_ARRAYS << 12):
                raise ValueError("it holds more than was written")
            for member in stored.infolist():
                _check_header(stored, member)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # a damaged archive fails in as many ways as there are bytes
        if is_want(error):
            raise
        raise ValueError(
            f"{path.name} holds no pictures: {type(error).__name__}: {error}"
        ) from error


def _check_header(stored: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Raise ValueError where an array says that it is larger than its file: what it asks for is no want of memory."""
    from numpy.lib import format as npy

    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    with stored.open(member) as file:
        npy.read_magic(file)
        try:
            shape, _, kind = npy.read_array_header_1_0(file)
        except MemoryError as error:  # how Python's parser complains of what is nested too deeply
            raise ValueError("a header that nobody can read") from error
    if math.prod(shape) * kind.itemsize > member.file_size:
        raise ValueError("an array is larger than its file")

"""The arrays from which a step's pictures are drawn: an ``.npz`` file, from training to courier.

Reading uses no pickle, and reads a bounded number of bytes whatever the file claims.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankzero.events import PicturesTaken
from rankzero.permanent_errors import lacks_resources
from rankzero.run_store import disk, symlinks
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all

_DONE = "pictures_done.txt"
MAX_BYTES = 256 << 20  # more than sixteen colour images of 2048 x 2048
_MAX_ARRAYS = 64
# Names of complete files, and of files that are being written.
_OURS = re.compile(r"step_\d+_\d+\.npz|\.step_\d+_\d+\.npz\.\d+")


def write(path: Path, arrays: Mapping[str, Any], max_bytes: int = MAX_BYTES) -> None:
    """Write the arrays in one step. Raises ValueError if they are too large, OSError.

    Nothing is synced, because the step waits. The journal does it before its own sync.
    """
    import numpy as np

    size = sum(array.nbytes for array in arrays.values())
    if size > max_bytes:
        raise ValueError(f"{size >> 20} MiB of pictures are too large: at most {max_bytes >> 20}")
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb", opener=symlinks.no_follow) as file:
            np.savez(file, **arrays)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    # A run without this file is of a version that made no marks.
    with contextlib.suppress(OSError):
        (path.parents[1] / _DONE).touch(exist_ok=False)  # follows no link


def clear(folder: RunFolder) -> None:
    """Remove the files that no event of the journal names: a killed writer left them.

    Syncs the others, because the next attempt syncs the journal that names them. For the only
    writer, before it writes: a courier may be drawing from the others. Raises nothing.
    """
    with contextlib.suppress(OSError):
        left = [] if folder.pictures.is_symlink() else sorted(folder.pictures.iterdir())
        left = [path for path in left if _OURS.fullmatch(path.name) and path.is_file()]
        if not left:  # the usual case, and a journal is long
            return
        events = read_all(folder.events)
        named = {Path(event.path).name for event in events if isinstance(event, PicturesTaken)}
        for path in left:
            if path.name not in named:
                path.unlink(missing_ok=True)
        disk.sync_all(left, folder.path)


def mark_done(folder: RunFolder, path: Path) -> bool:
    """Note that a file was uploaded or rejected. Return whether it may be deleted now.

    Otherwise a replay could take it for a file that was lost. Raises nothing.
    """
    marks = folder.path / _DONE
    # Without the file, the folder was moved, and another run may have its name.
    with contextlib.suppress(OSError):
        if path.exists():
            with open(marks, "a", encoding="utf-8", opener=symlinks.no_follow) as file:
                # A line that a power loss cut does not swallow this one.
                file.write(f"\n{path.name}")
            disk.sync_all([marks], folder.path)
            return True
    return False


def is_done(folder: RunFolder, path: Path) -> bool:
    """Return whether `mark_done` has noted the file, or the run is of a version without marks."""
    marks = folder.path / _DONE
    try:
        return path.name in _names(marks, marks.stat().st_size)
    except FileNotFoundError:
        return True
    except OSError:
        return False


@functools.lru_cache(maxsize=1)
def _names(marks: Path, size: int) -> frozenset[str]:
    # A file that grew is read again. A replay asks for each picture of a run.
    del size
    return frozenset(marks.read_text(encoding="utf-8", errors="replace").splitlines())


def read(path: Path) -> dict[str, Any]:
    """Return the arrays.

    Raises ValueError if the content was not written by `write`. A lack of memory, files or disk
    is raised as it is, because the file may be read later.
    """
    import numpy as np

    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path.name} is no file")
    try:
        with zipfile.ZipFile(path) as stored:
            sizes = [member.file_size for member in stored.infolist()]
            if len(sizes) > _MAX_ARRAYS or sum(sizes) > MAX_BYTES + (_MAX_ARRAYS << 12):
                raise ValueError("it holds more than was written")
            # zipfile unpacks some kinds without a limit.
            if any(member.compress_type != zipfile.ZIP_STORED for member in stored.infolist()):
                raise ValueError("it is compressed")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except Exception as error:  # a damaged archive fails in as many ways as there are bytes
        if lacks_resources(error):
            raise
        raise ValueError(
            f"{path.name} holds no pictures: {type(error).__name__}: {error}"
        ) from error

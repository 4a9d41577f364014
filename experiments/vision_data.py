"""Load torchvision's data sets, downloaded once per machine, for mnist.py and cifar10.py."""

import contextlib
import fcntl
import io
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rankzero import UserError

FOLDER = Path("data")
PATIENCE_SECONDS = 10.0


def downloaded(dataset: Callable[..., Any], **options: Any) -> Any:
    """Return ``dataset("data", **options)``, and download it first if it is missing.

    Every rank calls it: one rank downloads, the others wait. Raises UserError, with the expected
    folder, if the download fails.
    """
    # torchvision raises RuntimeError if the files are missing or damaged.
    with _lock(fcntl.LOCK_SH), contextlib.suppress(RuntimeError):
        return dataset(FOLDER, download=False, **options)
    with _lock(fcntl.LOCK_EX):
        return _download(dataset, options)


@contextlib.contextmanager
def _lock(kind: int) -> Iterator[None]:
    """Hold the folder's lock, shared (LOCK_SH) to read or exclusive (LOCK_EX) to download."""
    # The lock is needed because torchvision takes half a download for a complete one.
    try:
        FOLDER.mkdir(exist_ok=True)
        file = (FOLDER / ".lock").open("w")
    except OSError:
        # The folder is read-only: no process can download into it, so no lock is needed.
        yield
        return
    with file:
        # A file system may have no locks. Then several ranks may download.
        with contextlib.suppress(OSError):
            fcntl.flock(file, kind)
        yield


def _download(dataset: Callable[..., Any], options: dict[str, Any]) -> Any:
    # torchvision sets no timeout: without one, a download could hang.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE_SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return dataset(FOLDER, download=True, **options)
    except (RuntimeError, OSError) as error:
        name = getattr(dataset, "__name__", "the data set")
        folder = FOLDER.absolute() / getattr(dataset, "base_folder", f"{name}/raw")
        why = str(error).strip().splitlines()[-1].removeprefix("<urlopen error ").rstrip(">")
        raise UserError(
            f"{name} is not in {folder} and cannot be downloaded ({why}): "
            "put torchvision's files there, or use data=fake for speed work"
        ) from error
    finally:
        socket.setdefaulttimeout(before)

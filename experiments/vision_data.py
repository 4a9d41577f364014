"""torchvision's data sets, downloaded once a machine: what mnist.py and cifar10.py share."""

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
    """Return ``dataset("data", **options)``, downloaded first where it is missing.

    Every rank calls it: one downloads, the others wait for it. Raises UserError, with the folder
    that is expected, where it cannot be downloaded.
    """
    with (
        _lock(fcntl.LOCK_SH),
        contextlib.suppress(RuntimeError),
    ):  # torchvision's word for "not there, or damaged"
        return dataset(FOLDER, download=False, **options)
    with _lock(fcntl.LOCK_EX):
        return _download(dataset, options)


@contextlib.contextmanager
def _lock(kind: int) -> Iterator[None]:
    """Share the folder with readers, or keep it to oneself: half a download looks whole to torchvision."""
    try:
        FOLDER.mkdir(exist_ok=True)
        file = (FOLDER / ".lock").open("w")
    except OSError:  # a read-only folder: nobody downloads into it
        yield
        return
    with file:
        fcntl.flock(file, kind)
        yield


def _download(dataset: Callable[..., Any], options: dict[str, Any]) -> Any:
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
            f"{name} is not in {folder} and cannot be downloaded ({why}): put torchvision's files there, "
            "or use data=fake for speed work"
        ) from error
    finally:
        socket.setdefaulttimeout(before)

"""torchvision's data sets, downloaded once a machine: what mnist.py and cifar10.py share."""

import contextlib
import fcntl
import io
import socket
from collections.abc import Callable
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
    with contextlib.suppress(RuntimeError):  # torchvision's word for "not there, or damaged"
        return dataset(FOLDER, download=False, **options)
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _download(dataset, options)


def _download(dataset: Callable[..., Any], options: dict[str, Any]) -> Any:
    name = getattr(dataset, "__name__", "the data set")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE_SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return dataset(FOLDER, download=True, **options)
    except (RuntimeError, OSError) as error:
        why = str(error).splitlines()[0].rstrip(":")
        raise UserError(
            f"{name} is not in {FOLDER.absolute() / name} and cannot be downloaded ({why}): put torchvision's copy "
            "there, or use data=fake for speed work"
        ) from error
    finally:
        socket.setdefaulttimeout(before)

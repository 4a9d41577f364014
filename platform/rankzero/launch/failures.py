"""What went wrong, and whose fault it is: a failing rank says so before it dies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from rankzero.config import ConfigError
from rankzero.errors import UserError
from rankzero.redaction.text import text_without_secrets
from rankzero.run_store.folder import write_atomically

OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator",
)
OURS = str(Path(__file__).parents[1])


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a rank failed. `reason` is one line for people, `error` the whole traceback."""

    time: float
    rank: int
    reason: str
    error: str


def describe(error: BaseException, rank: int) -> Failure:
    """Return the failure behind an exception, in words without secrets: MLflow will be told."""
    trace = text_without_secrets("".join(traceback.format_exception(error)))
    return Failure(time.time(), rank, text_without_secrets(reason(error)), trace)


def reason(error: BaseException) -> str:
    """Say in a line what happened, and where in the user's code."""
    if isinstance(error, (UserError, ConfigError)):
        return str(error)
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    place = place_of(traceback.extract_tb(error.__traceback__))
    return f"{text} ({place})" if place else text


def is_out_of_memory(text: str) -> bool:
    """Tell whether a reason or a traceback is a device's lack of memory; a CPU's, too."""
    return any(word in text for word in OUT_OF_MEMORY)


def write(failure: Failure, folder: Path) -> None:
    """Leave word in ``<folder>/rank_<r>.json``, without secrets: it goes to MLflow. A full disk takes none."""
    told = dataclasses.replace(
        failure,
        reason=text_without_secrets(failure.reason),
        error=text_without_secrets(failure.error),
    )
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"rank_{failure.rank}.json", json.dumps(dataclasses.asdict(told)))


def forget(folder: Path, rank: int) -> None:
    """Remove what a rank said of an earlier start: who is started again begins without a failure."""
    (folder / f"rank_{rank}.json").unlink(missing_ok=True)


def first(folder: Path) -> Failure | None:
    """Return the earliest failure that a rank left in `folder`: the others follow from it."""
    found = []
    for path in folder.glob("rank_*.json"):
        try:
            found.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return min(found, key=lambda failure: failure.time, default=None)


def place_of(stack: Iterable[traceback.FrameSummary]) -> str | None:
    """Return ``file.py, line 31, in measure`` of the innermost frame that is the user's."""
    frames = [
        frame
        for frame in stack
        if not frame.filename.startswith((OURS, "<"))
        and "site-packages" not in frame.filename
        and "/lib/python" not in frame.filename
    ]
    if not frames:
        return None
    return f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}"

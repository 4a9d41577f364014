"""Failure files: a failing rank writes why it failed before it ends.

A rank writes ``failures/rank_<r>.json`` into the run's folder. The launcher, the search and the
recorder read it. `Failure.kind` is what they decide by; the texts are for people.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankzero import ranks
from rankzero.config import ConfigError
from rankzero.errors import NotFinite, UserError
from rankzero.redaction.text import text_without_secrets
from rankzero.run_store.folder import write_atomically

# PyTorch has one exception type for CUDA's lack of memory. NVIDIA's libraries and the CPU's
# allocator raise a plain RuntimeError, so their messages are all there is to go by.
_OUT_OF_MEMORY_TEXTS = (
    "OutOfMemoryError",
    "out of memory",
    "_ALLOC_FAILED",  # cuBLAS, cuSOLVER, cuFFT
    "_DEVICE_ALLOCATION_FAILED",  # cuDNN
    "DefaultCPUAllocator",
)
_NO_CUDNN_ENGINE = re.compile("nable to find (an engine|a valid cuDNN algorithm)")
# gloo's and NCCL's, and no error of a download: a user's code may raise RuntimeErrors, too.
_LOST_RANK = re.compile(
    r"(/gloo/|NCCL error|ncclRemoteError)"
    r".*(Connection (closed|reset) by peer|Connection timed out|Broken pipe|remote process exit)",
    re.DOTALL,
)
_OUR_CODE = str(Path(__file__).parents[1])


class FailureKind(enum.StrEnum):
    """The kind of a failure, for the programs that read it."""

    OUT_OF_MEMORY = "out_of_memory"
    """PyTorch could not allocate memory on the training device."""
    OUT_OF_HOST_MEMORY = "out_of_host_memory"
    """Python could not allocate memory."""
    NOT_FINITE = "not_finite"
    """The loss became NaN or infinite."""
    USER_ERROR = "user_error"
    """The user can mend it: a wrong setting or a missing file."""
    HANG = "hang"
    """A watchdog or the search ended it because it made no progress."""
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a rank failed. `reason` is one line for people, `error` the whole traceback."""

    time: float
    rank: int
    reason: str
    error: str
    kind: FailureKind = FailureKind.OTHER


class DescribedError(Exception):
    """A failure of another process, which has described it: its exception may not be sent.

    `of_peer`: that process is another rank, and not one that loads data for this one.
    """

    def __init__(self, failure: Failure, *, of_peer: bool = False) -> None:
        super().__init__(failure.reason)
        self.failure, self.of_peer = failure, of_peer


def describe(error: BaseException, rank: int) -> Failure:
    """Return the failure behind an exception, its texts without secrets: MLflow gets them."""
    if isinstance(error, DescribedError):
        found = error.failure.rank if error.of_peer else rank
        return dataclasses.replace(error.failure, time=time.time(), rank=found)
    trace = text_without_secrets("".join(traceback.format_exception(error)))
    text = reason(error)
    if "DataLoader worker (pid" in text:  # PyTorch's advice, if any, is num_workers=0.
        text = f"{text.partition('. Details')[0]}; train.workers=0 may show its error"
    return Failure(time.time(), rank, text_without_secrets(text), trace, _kind(error))


def reason(error: BaseException) -> str:
    """Return one line: what happened, and where in the user's code."""
    if isinstance(error, (UserError, ConfigError, DescribedError)):
        return str(error)
    if shows_lost_rank(error):
        here = ranks.detect()
        where = ": see the output of the other machines"
        several = here.local_world_size < here.world_size
        lost = "another rank's process or machine, or the network between them, was lost"
        lost += where if several else ""
        return "; ".join([lost, *getattr(error, "__notes__", ())])
    text = f"{type(error).__name__}: {_first_line(error)}".rstrip(": ")
    place = place_of(traceback.extract_tb(error.__traceback__))
    late = ""
    if "CUDA error: " in text and _kind(error) == FailureKind.OTHER:
        late = "; a GPU reports errors late: CUDA_LAUNCH_BLOCKING=1 shows the line that made it"
    return (f"{text} ({place})" if place else text) + late


def _text(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:  # A user's type may raise anything.
        return "without a text"


def _first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, and the next one if it only introduces that.

    PyTorch wraps the error of another thread, and the last line is its own text.
    """
    first, *rest = _text(error).split("\n", 2)
    if rest and rest[0].startswith("Original Traceback"):
        own = _text(error).rpartition("\n")[2]
        return own.removeprefix(f"{type(error).__name__}: ")
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first


def shows_lost_rank(error: BaseException) -> bool:
    """Return whether a collective failed because another rank's process has ended."""
    is_one_of_several = ranks.detect().world_size > 1 and isinstance(error, RuntimeError)
    return is_one_of_several and bool(_LOST_RANK.search(_text(error)))


def parse(fields: Mapping[str, Any]) -> Failure:
    """Return the failure that `dataclasses.asdict` and JSON made a mapping of.

    Older versions wrote no kind, and later ones may write others. Both read as OTHER.
    Raises TypeError for a mapping that is not a failure.
    """
    kinds = {kind.value: kind for kind in FailureKind}
    return Failure(**{**fields, "kind": kinds.get(fields.get("kind", ""), FailureKind.OTHER)})


def write(failure: Failure, folder: Path, writer: int | None = None) -> None:
    """Write ``<folder>/rank_<r>.json`` without secrets: MLflow gets it. Ignore a full disk.

    `writer`: the rank that writes, if the failure may be another one's.
    """
    redacted = dataclasses.replace(
        failure,
        reason=text_without_secrets(failure.reason),
        error=text_without_secrets(failure.error),
    )
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(redacted))
        rank = failure.rank if writer is None else writer
        write_atomically(folder / f"rank_{rank}.json", text)


def forget(folder: Path, rank: int) -> None:
    """Remove a rank's failure of an earlier start."""
    (folder / f"rank_{rank}.json").unlink(missing_ok=True)


def first(folder: Path) -> Failure | None:
    """Return the earliest failure in `folder`, or None. Other ranks' failures follow from it."""
    found = []
    for path in folder.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            found.append(parse(json.loads(path.read_text(encoding="utf-8"))))
    return min(found, key=lambda failure: failure.time, default=None)


def place_of(stack: Iterable[traceback.FrameSummary]) -> str | None:
    """Return ``file.py, line 31, in measure`` of the innermost frame of the user, or None."""
    frames = [
        frame
        for frame in stack
        if not frame.filename.startswith((_OUR_CODE, "<"))
        and "site-packages" not in frame.filename
        and "/lib/python" not in frame.filename
    ]
    if not frames:
        return None
    return f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}"


def _kind(error: BaseException) -> FailureKind:
    """Return the kind of the first exception in the chain that has one."""
    for one in _chain(error):
        text = f"{type(one).__name__}: {_text(one)}"
        if any(words in text for words in _OUT_OF_MEMORY_TEXTS) or _hides_lack_of_memory(text):
            return FailureKind.OUT_OF_MEMORY
        if isinstance(one, MemoryError):
            return FailureKind.OUT_OF_HOST_MEMORY
        if isinstance(one, NotFinite):
            return FailureKind.NOT_FINITE
        if isinstance(one, (UserError, ConfigError)):
            return FailureKind.USER_ERROR
    return FailureKind.OTHER


def _hides_lack_of_memory(text: str) -> bool:
    """Return whether a convolution got no memory. Its text is also that of unknown formats."""
    torch: Any = sys.modules.get("torch")
    is_unclear = torch is not None and _NO_CUDNN_ENGINE.search(text)
    return bool(is_unclear and torch.cuda.memory_stats().get("num_ooms"))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that a traceback shows as its causes."""
    seen: set[int] = set()
    found: BaseException | None = error
    # A context may lead back to its own exception, where code raised one object twice.
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        hidden = found.__suppress_context__ and found.__cause__ is None
        found = found.__cause__ or (None if hidden else found.__context__)

"""Let one call after another fail, and check that nothing is lost, doubled or falsely FINISHED.

    python -m crash_points.errors ROOT SHARE [NUMBER]

Runs under the preloaded library (`record.environment`). Each fault has a fork of its own, which
trains one attempt to its end. SHARE of all faults are tried, or only fault NUMBER.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import random
import shutil
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from crash_points import recovery, session
from crash_points.record import Kind, read_log
from crash_points.recovery import Oracle, Violation
from rankzero.run_store.folder import RunFolder
from support.memory_store import MemoryStore

_FAULT = struct.Struct("=QQii")  # the first fields of `struct shared` in interpose.c
HOW = ("once", "from then on", "short write", "syncs from then on")


REFUSED = 2  # exit code of an attempt that an OSError has ended


class Fault(NamedTuple):
    """A fault and its call."""

    call: int
    error: str
    how: str


FAULTS: tuple[tuple[str, str, Kind | None], ...] = (
    ("EIO", "once", None),
    ("ENOSPC", "once", None),
    ("EINTR", "once", None),
    ("EIO", "short write", Kind.WRITE),
    ("ENOSPC", "from then on", None),
    ("EIO", "syncs from then on", Kind.SYNC),
)
"""Faults for every call, or only for those of one kind. The disk recovers with the attempt's
end."""


class Injector:
    """Arms the preloaded library."""

    def __init__(self) -> None:
        with Path(os.environ["CRASH_SHARED"]).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def arm(self, fault: Fault | None) -> None:
        """Count calls from now on, and let the fault's call fail."""
        fields = (0, 0, 0, 0)
        if fault is not None:
            fields = (0, fault.call, getattr(errno, fault.error), HOW.index(fault.how))
        _FAULT.pack_into(self._memory, 0, *fields)

    def calls(self) -> int:
        """Return how many calls were made since."""
        return int(_FAULT.unpack_from(self._memory)[0])


def main(root: Path, share: float, only: int | None = None) -> int:
    """Try the faults, print a report, and return 1 if a promise was broken, else 0."""
    logging.disable()  # a fault is logged with its traceback
    injector, log = Injector(), Path(os.environ["CRASH_LOG"])
    session.run_undisturbed(root)
    undisturbed = RunFolder(session.undisturbed(root) / "runs" / session.RUN)
    oracle = Oracle.of(undisturbed, session.experiment().goal)
    count, _ = _run(root, injector, None)
    kinds = [call.kind for call in read_log(root) if call.path != session.STORE][-count:]
    faults = [
        Fault(call, error, how)
        for call, kind in enumerate(kinds, 1)
        for error, how, only_kind in FAULTS
        if only_kind in (kind, None)
    ]
    outcomes: Counter[str] = Counter()
    chance, broken = random.Random(0), 0
    for number, fault in enumerate(faults):
        if (chance.random() >= share) if only is None else (number != only):
            continue
        os.truncate(log, 0)
        _, status = _run(root, injector, fault)
        failed = [call.path for call in read_log(root) if call.kind is Kind.FAILED]
        try:
            how = recovery.check(root, MemoryStore(root / session.STORE), oracle)
            outcomes[f"exit {os.waitstatus_to_exitcode(status)}, {how}"] += 1
        except Violation as violation:
            broken += 1
            place = f"call {fault.call} ({failed[0]}, {len(failed)} failed)"
            print(f"{number} {fault.error} {fault.how} at {place}: {violation}", flush=True)
    total = sum(outcomes.values()) + broken
    print(f"errors {total:,} of {len(faults):,}; outcomes {dict(outcomes)}; violations {broken}")
    return int(broken > 0)


def _run(root: Path, injector: Injector, fault: Fault | None) -> tuple[int, int]:
    """Run an attempt in a new folder; return the number of its calls, and its wait status."""
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    session.create(root)
    injector.arm(fault)

    def attempt() -> None:
        # The notices about the fault, and the error of a command that could not begin.
        with contextlib.redirect_stdout(None), contextlib.suppress(OSError):
            session.attempt(root, 1, writer_seconds=0.0)
            return
        os._exit(REFUSED)

    status = session.in_fork(attempt)
    count = injector.calls()
    injector.arm(None)
    return count, status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:])))

"""Record what processes do with files: compile and preload `interpose.c`, and read its log."""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from crash_points import session
from rankzero.events import StepsLogged
from rankzero.run_store.journal import read_all
from support.paths import FIXTURES, ROOT, TESTS

SOURCE = Path(__file__).with_name("interpose.c")
COMPILER = shutil.which("gcc") or shutil.which("cc")
_RECORD = struct.Struct("=IIIIIiQ")
_SHARED_BYTES = 4096
SESSION = (sys.executable, "-m", "crash_points.session")


class Kind(enum.IntEnum):
    """The kinds of calls, with the numbers of `interpose.c`."""

    CREATE = 1
    WRITE = 2
    SYNC = 3
    RENAME = 4
    UNLINK = 5
    MKDIR = 6
    LINK = 7
    TRUNCATE = 8
    FAILED = 9


class Call(NamedTuple):
    """One successful call. Paths are relative to the recorded folder."""

    kind: Kind
    path: str
    other: str
    data: bytes
    offset: int
    """The place of a write. The new length after a truncation. 1 if a CREATE also truncates."""
    pid: int
    error: int = 0

    def __str__(self) -> str:
        size = f" {len(self.data)} bytes at {self.offset}" if self.kind is Kind.WRITE else ""
        return (
            f"{self.kind.name.lower()} {self.path}{f' to {self.other}' if self.other else ''}{size}"
        )


def compile_library(folder: Path) -> Path:
    """Compile the library into the folder and return its path."""
    assert COMPILER is not None
    library = folder / "interpose.so"
    command = [COMPILER, "-O2", "-Wall", "-shared", "-fPIC", "-pthread", "-ldl"]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library


def environment(library: Path, root: Path) -> dict[str, str]:
    """Return the variables under which a process and its children are recorded.

    The log is next to `root`, with the suffix ``.log``.
    """
    shared = root.with_suffix(".shared")
    shared.write_bytes(bytes(_SHARED_BYTES))
    path = os.pathsep.join([str(ROOT / "platform"), str(TESTS)])
    return os.environ | {
        "LD_PRELOAD": str(library),
        "CRASH_ROOT": str(root),
        "CRASH_LOG": str(root.with_suffix(".log")),
        "CRASH_SHARED": str(shared),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
    }


def memory_folder() -> str | None:
    """Return a folder in memory, or None: there, a sync takes no time."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def record_session(library: Path, root: Path) -> None:
    """Record the training of `session.py` below `root`."""
    root.mkdir()
    environ = environment(library, root)
    subprocess.run([*SESSION, root, "undisturbed"], check=True, env=unrecorded(environ))
    subprocess.run([*SESSION, root, "recorded"], check=True, env=environ)


def record_command(library: Path, root: Path) -> None:
    """Record the same training by the real command: SIGKILL to all its processes, then a resume.

    Recorder and courier are real, but the courier's store is the one in memory.
    """
    root.mkdir()
    environ = environment(library, root)
    subprocess.run([*SESSION, root, "undisturbed"], check=True, env=unrecorded(environ))
    environ["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).with_name('in_memory')}"
    command = [sys.executable, "-m", "rankzero"]
    settings = [f"{key}={value}" for key, value in session.SETTINGS.items()]
    start = ["train", str(FIXTURES / "tiny.py"), *settings, "step_seconds=0.4"]
    where = ["--run-name", session.RUN, "--tracking-uri", "http://127.0.0.1:9", "--dir", str(root)]
    events = root / "runs" / session.RUN / "events.jsonl"
    with subprocess.Popen([*command, *start, *where], env=environ, cwd=root.parent) as process:
        while process.poll() is None and last_step(events) < session.KILLED_AT[1]:
            time.sleep(0.1)
        for recorded in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if recorded.environ().get("CRASH_ROOT") == str(root):
                    recorded.kill()
    resume = ["resume", session.RUN, "--dir", str(root)]
    subprocess.run([*command, *resume], check=True, env=environ, cwd=root.parent)


def unrecorded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the preloaded library."""
    return {name: value for name, value in environ.items() if name != "LD_PRELOAD"}


def last_step(journal: Path) -> int:
    """Return the last step in a journal, or 0."""
    logged = (event for event in read_all(journal) if isinstance(event, StepsLogged))
    return max((event.steps[-1] for event in logged), default=0)


def read_log(root: Path) -> list[Call]:
    """Return what was recorded below `root`."""
    content, prefix = root.with_suffix(".log").read_bytes(), len(str(root)) + 1
    at, calls = 0, []
    while at < len(content):
        kind, pid, path, other, data, error, offset = _RECORD.unpack_from(content, at)
        at += _RECORD.size
        texts = []
        for length in (path, other, data):
            texts.append(content[at : at + length])
            at += length
        first, second = (os.fsdecode(text)[prefix:] for text in texts[:2])
        calls.append(Call(Kind(kind), first, second, texts[2], offset, pid, error))
    return calls

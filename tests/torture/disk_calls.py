"""Preload `disk_calls.c` into a scenario's processes: cut the power, and fail calls on the disk."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import shutil
import subprocess
import uuid
from pathlib import Path

from torture.ground import Ground, NotRun

SOURCE = Path(__file__).with_suffix(".c")
# The calls that can fail, in the order of the library's enumeration.
CALLS = ("nothing", "write", "sync", "rename", "open", "mkdir", "unlink")
SHORT = -1
ERRORS = {
    name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EROFS", "EDQUOT", "EINTR", "EMFILE")
} | {"half": SHORT}


class Failing(ctypes.Structure):
    """The record that the library reads before each call."""

    _fields_ = (
        ("call", ctypes.c_int),
        ("error", ctypes.c_int),
        ("left", ctypes.c_int),
        ("met", ctypes.c_int),
    )


class DiskCalls:
    """Watches the calls that a scenario's processes make on files below the runs' folder.

    It starts with the next command. Raises NotRun without a C compiler.
    """

    def __init__(self, ground: Ground) -> None:
        self._disk, self._folder = ground.runs_folder, ground.folder / "synced"
        self._folder.mkdir()
        (self._folder / "log").touch()
        control = self._folder / "failing"
        control.write_bytes(bytes(ctypes.sizeof(Failing)))
        with control.open("r+b") as file:
            self._failing = Failing.from_buffer(mmap.mmap(file.fileno(), 0))
        ground.environ |= {
            "LD_PRELOAD": str(_library(ground.empty.parent)),
            "TORTURE_DISK": str(self._disk),
            "TORTURE_SYNCED": str(self._folder),
            "TORTURE_FAILS": str(control),
        }

    def fail(self, call: str, error: str, times: int) -> None:
        """Fail the next `times` calls of this kind, in whichever process makes them."""
        self._failing.left, self._failing.met = times, 0
        self._failing.error, self._failing.call = ERRORS[error], CALLS.index(call)

    @property
    def met(self) -> int:
        """How many calls have failed since `fail`."""
        return int(self._failing.met)

    def allow(self) -> int:
        """Fail no call from now on. Return how many have failed."""
        self._failing.call = 0
        return self.met

    def synced_bytes(self, path: Path) -> int:
        """Return how much of a file is certain to survive a power cut."""
        synced, _ = self._read()
        size, known = synced.get(path.stat().st_ino, (0, ""))
        return size if known == str(path) else 0

    def cut(self, way: str, choose: random.Random) -> None:
        """Leave below the runs' folder what the power cut left. No process may still run.

        Renames are undone after which nothing was synced. The unsynced part of each file is
        ``dropped``, ``torn`` (a random part of both stays), or ``zeroed``: the file keeps its
        length, and has zeros there.
        """
        synced, renames = self._read()
        undone = renames[choose.randrange(len(renames) + 1) :] if way == "torn" else renames
        for old, new, kept in reversed(undone):
            if os.path.lexists(new):
                Path(new).rename(old)
                if kept:
                    Path(kept).rename(new)
        moved = {new: old for old, new, _ in undone}
        for path in (path for path in self._disk.rglob("*") if path.is_file()):
            seen = path.stat()
            size, known = synced.get(seen.st_ino, (0, ""))
            if str(path) not in (known, *_renamed(known, moved)):
                size = 0
            if seen.st_size > size:
                _cut(path, size, seen.st_size, way, choose)
        # The content of the disk now has survived.
        with (self._folder / "log").open("w") as log:
            for path in (self._disk, *self._disk.rglob("*")):
                seen = path.stat()
                log.write(f"S\t{seen.st_ino}\t{seen.st_size}\t{path}\n")

    def _read(self) -> tuple[dict[int, tuple[int, str]], list[tuple[str, str, str]]]:
        """Return the synced size and path of each inode, and the renames that may be undone."""
        synced: dict[int, tuple[int, str]] = {}
        renames: list[tuple[str, str, str]] = []
        for line in (self._folder / "log").read_text().splitlines():
            kind, *words = line.split("\t")
            if kind == "S":
                inode, size, path = words
                synced[int(inode)] = int(size), path
                # ext4, XFS and btrfs keep the order of names: one sync makes all earlier ones last.
                renames = []
            else:
                old, new, kept = words
                renames.append((old, new, kept))
                synced = {
                    inode: (size, _renamed(path, {old: new})[-1])
                    for inode, (size, path) in synced.items()
                }
        return synced, renames


def _renamed(path: str, names: dict[str, str]) -> list[str]:
    """Return the path, and what it became by these renames of it or of a folder above it."""
    found = [path]
    for old, new in names.items():
        if path == old or path.startswith(f"{old}/"):
            found.append(new + path[len(old) :])
    return found


def _cut(path: Path, synced: int, size: int, way: str, choose: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(choose.randrange(synced, size + 1) if way == "torn" else synced)
        if way == "zeroed":
            file.truncate(size)


def _library(folder: Path) -> Path:
    """Compile the library, once for a campaign, and return its path."""
    library = folder / "disk_calls.so"
    compiler = shutil.which("cc")
    if compiler is None:
        raise NotRun("calls on the disk can be watched only with a C compiler")
    if not library.exists():
        # Another process may compile it, too.
        partial = library.with_name(f"{uuid.uuid4().hex}.so")
        words = ["-O1", "-shared", "-fPIC", "-o", str(partial), str(SOURCE), "-ldl"]
        subprocess.run([compiler, *words], check=True, capture_output=True)
        partial.rename(library)
    return library

"""Small file systems in the place of a folder: they can be filled, and made read-only."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from torture.ground import wait_for


class Disk:
    """A file system that can be filled."""

    def __init__(self, path: Path) -> None:
        self._path, self._filler = path, path / "filler"

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    def protect(self) -> bool:
        """Make it read-only, as a kernel does after errors; return whether that went: not while files are written."""
        return wait_for(lambda: self._mounted("ro"), 5.0)

    def allow(self) -> None:
        """Let everybody write again."""
        self._mounted("rw")

    def _mounted(self, how: str) -> bool:
        words = ["mount", "-o", f"remount,{how}", str(self._path)]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int = 24) -> Iterator[Disk]:
    """Mount a small file system over a folder, with what is in it, for the duration of the block."""
    kept = path.with_name(f"{path.name}-kept")
    path.mkdir(parents=True, exist_ok=True)
    shutil.copytree(path, kept)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(path)], check=True)
    try:
        shutil.copytree(kept, path, dirs_exist_ok=True)
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)

"""Mount small file systems over a folder, to fill them or make them read-only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from torture.ground import Broken, NotRun, wait_for

IMAGE_BYTES = 64 << 20
UNALLOWED = "a disk that fails needs root, loop devices and mkfs.ext4"


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
        """Make it read-only. Return whether that succeeded: it fails while files are written."""
        return wait_for(lambda: self._mounted("ro"), 5.0)

    def allow(self) -> None:
        """Make it writable again."""
        self._mounted("rw")

    def _mounted(self, how: str) -> bool:
        words = ["mount", "-o", f"remount,{how}", str(self._path)]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0


class FailingDisk:
    """A file system in a file. After an error, the kernel makes it read-only at once."""

    def __init__(self, path: Path, image: Path) -> None:
        self._path, self._image = path, image
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        _do("mkfs.ext4", "-q", "-F", str(image))

    def mount(self) -> None:
        _do("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self._path))

    def fail(self) -> bool:
        """Have the kernel find an error. Return whether the file system is read-only then."""
        # The fault is an error of the disk, not a power failure: written files are on the disk.
        _do("sync", "--file-system", str(self._path))
        device = _do("findmnt", "--noheadings", "--output", "SOURCE", str(self._path))
        Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("torture")
        try:
            (self._path / "probe").touch()
        except OSError:
            return True
        return False

    def repair(self) -> None:
        """Check and mount it again. No process of the run may still use it."""
        # Other programs of the machine may look at a file system for a moment, so it tries again.
        unmount = ["umount", str(self._path)]
        if not wait_for(
            lambda: subprocess.run(unmount, capture_output=True, check=False).returncode == 0
        ):
            _do(*unmount)
        subprocess.run(["e2fsck", "-fy", str(self._image)], capture_output=True, check=False)
        self.mount()


def can_fail() -> bool:
    """Return whether this user may mount file systems in files, and trigger errors in them."""
    return (
        os.geteuid() == 0
        and Path("/dev/loop-control").exists()
        and shutil.which("mkfs.ext4") is not None
    )


@contextlib.contextmanager
def failing_disk(path: Path, image: Path) -> Iterator[FailingDisk]:
    """Mount a file system that can fail over a folder, and copy the folder's content into it.

    Unmounts it at the end of the block. Raises NotRun if this machine does not allow it.
    """
    if not can_fail():
        raise NotRun(UNALLOWED)
    kept = path.with_name(f"{path.name}-kept")
    path.mkdir(parents=True, exist_ok=True)
    shutil.copytree(path, kept)
    disk = FailingDisk(path, image)
    try:
        disk.mount()
    except subprocess.CalledProcessError as error:
        # Root of a user namespace may not mount it.
        raise NotRun(f"{UNALLOWED}: {_reason_of(error.stderr)}") from None
    try:
        shutil.copytree(kept, path, dirs_exist_ok=True)
        with _kept_if_broken(path):
            yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def _kept_if_broken(path: Path) -> Iterator[None]:
    """Copy what a file system holds when a scenario breaks, because unmounting it loses that."""
    try:
        yield
    except Broken:
        shutil.copytree(path, path.with_name(f"{path.name}-broken"), symlinks=True)
        raise


def _reason_of(errors: str) -> str:
    """Return why a mount failed, without the folder, so that equal reasons are equal texts."""
    return next(iter(errors.splitlines()), "").rpartition(": ")[2].rstrip(".")


def _do(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int = 24) -> Iterator[Disk]:
    """Mount a small file system over a folder, and copy the folder's content into it.

    Unmounts it at the end of the block. Raises NotRun if this machine does not allow it.
    """
    kept = path.with_name(f"{path.name}-kept")
    path.mkdir(parents=True, exist_ok=True)
    shutil.copytree(path, kept)
    words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(path)]
    mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    if mounted.returncode:
        raise NotRun(f"no small disk can be mounted here: {_reason_of(mounted.stderr)}")
    try:
        shutil.copytree(kept, path, dirs_exist_ok=True)
        with _kept_if_broken(path):
            yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)

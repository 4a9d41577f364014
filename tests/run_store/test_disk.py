"""Syncs of several files: each once, folders after what is in them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankzero.run_store import disk


def written(*paths: Path) -> list[Path]:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return list(paths)


def test_files_are_synced_before_their_folders_and_each_once(tmp_path: Path) -> None:
    top, order = tmp_path / "top", list[Path]()
    files = written(top / "a" / "deep" / "1", top / "a" / "deep" / "2", top / "3")
    disk.sync_all(files, top, order.append)
    assert order == [*files, top / "a" / "deep", top / "a", top]


def test_what_is_no_file_or_is_gone_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(*written(tmp_path / "theirs"))
    names = ("pipe", "link", "gone", "not\0possible", "nor\ud800this", "x" * 300)
    order: list[Path] = []
    disk.sync_all([tmp_path / name for name in names], tmp_path, order.append)
    assert order == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_loss_is_raised_once_all_others_are_synced(tmp_path: Path, number: int) -> None:
    files, order = written(tmp_path / "1", tmp_path / "2"), list[Path]()

    def confirm(path: Path) -> None:
        order.append(path)
        if path == files[0]:
            raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=os.strerror(number)):
        disk.sync_all(files, tmp_path, confirm)
    assert order == [*files, tmp_path]


def test_disk_that_cannot_sync_is_passed_over(tmp_path: Path) -> None:
    def confirm(path: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    disk.sync_all(written(tmp_path / "1"), tmp_path, confirm)


def test_a_synced_piece_keeps_its_content_and_a_disk_without_pieces_is_passed_over(
    tmp_path: Path,
) -> None:
    file, content = tmp_path / "large", os.urandom(3 << 20)
    file.write_bytes(content)
    for start in (0, 2 << 20):
        disk.sync(file, range(start, min(start + (2 << 20), len(content))))
    assert file.read_bytes() == content
    disk.sync(tmp_path, range(2 << 20))
    disk.sync(Path("/dev/null"), range(2 << 20))


def test_a_full_disk_has_a_size_and_no_room(tmp_path: Path) -> None:
    assert disk.is_full(tmp_path, lambda at: SimpleNamespace(total=1 << 40, free=4096))
    assert not disk.is_full(tmp_path, lambda at: SimpleNamespace(total=0, free=0))
    assert not disk.is_full(tmp_path) and not disk.is_full(tmp_path / "gone")

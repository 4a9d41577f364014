"""Arrays of pictures on disk: bounded, and cleared after a killed writer."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from rankzero.events import PicturesTaken
from rankzero.run_store import picture_files
from rankzero.run_store.folder import RunFolder
from support.pictures import arrays, taken
from support.runs import T0, append, make_folder, started


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path)


def bomb() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("confusion.npy", bytes(picture_files.MAX_BYTES + (1 << 20)))
    return content.getvalue()


def test_zip_bomb_is_not_unpacked(folder: RunFolder) -> None:
    event = taken(folder, 5, bomb())
    with pytest.raises(ValueError, match="more than was written"):
        picture_files.read(folder.path / event.path)


def test_array_that_claims_more_than_its_file_is_refused(folder: RunFolder) -> None:
    content = io.BytesIO()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 60,)}
    )
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("confusion.npy", header.getvalue())
    event = taken(folder, 5, content.getvalue())
    with pytest.raises(ValueError, match="larger than its file"):
        picture_files.read(folder.path / event.path)


def test_too_large_pictures_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too large"):
        picture_files.write(tmp_path / "x.npz", {"big": np.zeros(1001, np.uint8)}, max_bytes=1000)
    assert not list(tmp_path.iterdir())


def litter(folder: RunFolder) -> dict[str, Path]:
    """Create what a killed writer leaves, and foreign files."""
    folder.pictures.mkdir(exist_ok=True)
    names = {
        "whole": "step_00000007_1800000000000.npz",
        "half": ".step_00000009_1800000000000.npz.4711",
        "theirs": "notes.txt",
        "folder": "step_00000008_1800000000000.npz",
    }
    left = {key: folder.pictures / name for key, name in names.items()}
    left["folder"].mkdir()
    for key in ("whole", "half", "theirs"):
        left[key].write_bytes(b"x")
    return left


def test_only_files_of_a_killed_writer_are_removed(folder: RunFolder) -> None:
    left = litter(folder)
    named = folder.pictures / "step_00000005_1800000000000.npz"
    picture_files.write(named, arrays())
    append(folder, started(), PicturesTaken(T0, 5, f"pictures/{named.name}"))
    picture_files.clear(folder)
    assert set(folder.pictures.iterdir()) == {named, left["theirs"], left["folder"]}


def test_linked_folder_of_pictures_is_not_cleared(folder: RunFolder, tmp_path: Path) -> None:
    elsewhere = make_folder(tmp_path / "elsewhere")
    left = litter(elsewhere)
    folder.pictures.symlink_to(elsewhere.pictures)
    picture_files.clear(folder)
    assert set(elsewhere.pictures.iterdir()) == set(left.values())

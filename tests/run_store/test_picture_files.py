"""Arrays of pictures on disk: bounded, and cleared after a killed writer."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from rankzero.events import PicturesTaken
from rankzero.run_store import picture_files
from rankzero.run_store.attempt import append_run_ended, sync_pictures
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import Journal
from support.pictures import arrays, taken
from support.runs import T0, append, ended, make_folder, started
from support.syncs import recorded


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


@pytest.mark.parametrize(
    ("kind", "problem"), [(zipfile.ZIP_STORED, "EOF"), (zipfile.ZIP_BZIP2, "compressed")]
)
def test_array_that_claims_more_than_its_file_is_refused(
    folder: RunFolder, kind: int, problem: str
) -> None:
    content, array = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros(1 << 20, np.uint8))
    with zipfile.ZipFile(content, "w", kind) as archive:
        archive.writestr("confusion.npy", array.getvalue()[:200])
    event = taken(folder, 5, content.getvalue())
    with pytest.raises(ValueError, match=problem):
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


def test_a_full_disk_gets_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def savez(file: io.BufferedWriter, **_: object) -> None:
        file.write(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", savez)
    with pytest.raises(OSError, match="No space"):
        picture_files.write(tmp_path / "pictures" / "x.npz", arrays())
    assert not list((tmp_path / "pictures").iterdir())


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


def test_pictures_are_synced_before_their_journal_and_not_by_the_step(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = recorded(monkeypatch)
    journal = Journal(folder.events, fsync=lambda descriptor: order.append(folder.events))
    order.clear()
    for step in (5, 9):
        journal(taken(folder, step, arrays()))
    assert order == [], "the step waits for no disk"
    journal.sync()
    files = [folder.pictures / f"step_{step:08d}.npz" for step in (5, 9)]
    assert order == [*files, folder.pictures, folder.path, folder.events]
    journal.sync()
    assert order[5:] == [folder.events], "each is synced once"
    journal(taken(folder, 12, arrays()))
    journal(ended())
    last = [folder.pictures / "step_00000012.npz", folder.pictures, folder.path, folder.events]
    assert order[6:] == last and not journal.problems
    journal.close()


def test_pictures_that_the_disk_does_not_confirm_are_reported(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        if path.suffix == ".npz":
            raise OSError(5, "Input/output error")

    order = recorded(monkeypatch, fail)
    journal = Journal(folder.events, fsync=lambda descriptor: order.append(folder.events))
    journal(taken(folder, 5, arrays()))
    journal.sync()
    [problem] = journal.problems
    assert "did not confirm pictures" in problem and order[-1] == folder.events
    journal.close()


def test_pictures_of_a_dead_writer_are_synced_before_its_journal(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(folder, started(), taken(folder, 5, arrays()))
    named = folder.pictures / "step_00000006_1800000000000.npz"
    picture_files.write(named, arrays())
    append(folder, PicturesTaken(T0, 6, f"pictures/{named.name}"))
    order = recorded(monkeypatch)
    picture_files.clear(folder)
    assert order == [named, folder.pictures, folder.path]
    sync_pictures(folder)
    append_run_ended(folder, T0)
    assert set(order[3:5]) == {named, folder.pictures / "step_00000005.npz"}
    assert order[5:] == [folder.pictures, folder.path]

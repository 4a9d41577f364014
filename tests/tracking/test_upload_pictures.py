"""The way of pictures to MLflow: once, again after a crash, never foreign files."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankzero.events import PicturesTaken
from rankzero.reporting import image_grids
from rankzero.run_store import picture_files
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.deliverer import Deliverer
from support.memory_store import MemoryStore, delivered
from support.pictures import arrays, one_picture, taken
from support.runs import T0, append, ended, make_folder, saved, started


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path)


def test_pictures_are_uploaded_and_their_arrays_removed(folder: RunFolder) -> None:
    tracker = MemoryStore()
    append(folder, started(), taken(folder, 5, arrays()), taken(folder, 9, arrays()), ended())
    deliverer = delivered(folder, tracker)
    keys = ["confusion_matrix", "hardest_mistakes", "training_batch"]
    assert sorted(tracker.pictures) == [
        (key, step, int((T0 + step) * 1000)) for key in keys for step in (5, 9)
    ]
    assert not list(folder.pictures.iterdir()) and not deliverer.state.problems.rejected
    assert tracker.status == "FINISHED"


def test_replay_after_a_crash_uploads_the_same_pictures(folder: RunFolder) -> None:
    tracker = MemoryStore()
    append(folder, started(), taken(folder, 5, one_picture()), ended())
    delivered(folder, tracker)
    before = dict(tracker.pictures)
    (folder.path / "delivery.json").unlink()
    assert not delivered(folder, tracker).state.problems.rejected
    assert tracker.pictures == before


def test_unreachable_store_gets_the_pictures_later(folder: RunFolder) -> None:
    tracker, fails = MemoryStore(), iter([True, True, False])

    def fail(name: str, argument: object) -> None:
        if name == "log_pictures" and next(fails):
            raise ConnectionError("away")

    tracker.fail = fail
    append(folder, started(), taken(folder, 5, one_picture()), ended())
    delivered(folder, tracker)
    assert len(tracker.pictures) == 1 and not list(folder.pictures.iterdir())


def test_pictures_that_are_gone_are_reported_once_and_others_go_on(folder: RunFolder) -> None:
    tracker = MemoryStore()
    lost = taken(folder, 5, one_picture())
    append(folder, started(), lost, taken(folder, 9, one_picture()), saved(folder, 9), ended())
    (folder.path / lost.path).unlink()
    problems = delivered(folder, tracker).state.problems
    assert problems.rejected == 1
    assert problems.reasons == (f"pictures of step 5: {lost.path} is gone",)
    assert {step for _, step, _ in tracker.pictures} == {9} and list(tracker.checkpoints) == [9]
    assert tracker.status == "FINISHED" and lost.path in tracker.tags["mlflow.note.content"]
    assert delivered(folder, tracker).state.problems == problems


def test_pictures_whose_courier_died_after_their_deletion_are_not_reported(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    tracker, real = MemoryStore(), Deliverer.commit

    def commit(deliverer: Deliverer) -> None:
        if tracker.pictures and not (folder.pictures / "step_00000005.npz").exists():
            raise Died
        real(deliverer)

    append(folder, started(), taken(folder, 5, one_picture()), ended())
    with monkeypatch.context() as patch:
        patch.setattr(Deliverer, "commit", commit)
        with pytest.raises(Died):
            delivered(folder, tracker)
    state = delivered(folder, tracker).state
    assert not state.problems.rejected and len(tracker.pictures) == 1 and not state.queue.waiting


def pickled() -> bytes:
    content = io.BytesIO()
    np.savez(content, mistakes=np.array([print], dtype=object))
    return content.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive",
        pickled(),
        arrays(mistakes_true=np.zeros(2)),
        arrays(own_names=np.array(["x"], "U")),
    ],
)
def test_damaged_or_foreign_arrays_are_rejected(
    folder: RunFolder, content: dict[str, Any] | bytes
) -> None:
    tracker = MemoryStore()
    append(folder, started(), taken(folder, 5, content), ended())
    state = delivered(folder, tracker).state
    assert state.problems.rejected == 1 and "pictures of step 5" in state.problems.reasons[0]
    assert not tracker.pictures and tracker.status == "FINISHED"


@pytest.mark.parametrize(
    "path", ["../victim.npz", "/etc/hostname", "pictures/link.npz", "pictures", "run.json"]
)
def test_nothing_outside_of_the_folder_is_read_or_deleted(folder: RunFolder, path: str) -> None:
    victim = folder.path.parent / "victim.npz"
    picture_files.write(victim, one_picture())
    folder.pictures.mkdir()
    (folder.pictures / "link.npz").symlink_to(victim)
    append(folder, started(), PicturesTaken(T0, 5, path), ended())
    tracker = MemoryStore()
    state = delivered(folder, tracker).state
    assert state.problems.rejected == 1 and "leads out" in state.problems.reasons[0]
    assert not tracker.pictures and victim.exists() and (folder.path / "run.json").exists()


WANTS = [
    OSError(errno.ENOSPC, "no space"),
    MemoryError(),
    OSError(errno.EMFILE, "files"),
    OSError(errno.ESTALE, "gone"),
]


@pytest.mark.parametrize("want", WANTS, ids=repr)
@pytest.mark.parametrize("place", ["draw", "read", "load"])
def test_lack_of_disk_or_memory_is_retried(
    folder: RunFolder, want: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = {"draw": image_grids, "read": zipfile, "load": np}[place]
    name = {"draw": "draw", "read": "ZipFile", "load": "load"}[place]
    real, fails = getattr(owner, name), iter([True, True])

    def lacking(*given: Any, **named: Any) -> Any:
        if next(fails, False):
            raise want
        return real(*given, **named)

    event = taken(folder, 5, one_picture())
    monkeypatch.setattr(owner, name, lacking)
    append(folder, started(), event, ended())
    tracker = MemoryStore()
    state = delivered(folder, tracker).state
    assert (
        len(tracker.pictures) == 1 and not state.problems.rejected and state.retries.failures == 2
    )


def test_picture_that_needs_too_much_memory_is_rejected_in_the_end(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*given: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(image_grids, "draw", lacking)
    append(folder, started(), taken(folder, 5, one_picture()), saved(folder, 6), ended())
    tracker = MemoryStore()
    state = delivered(folder, tracker).state
    assert state.problems.rejected == 1 and "not enough memory" in state.problems.reasons[0]
    assert list(tracker.checkpoints) == [6] and list(folder.pictures.iterdir()), (
        "what it is drawn from stays"
    )


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EISDIR, errno.EINVAL])
def test_picture_that_no_file_system_accepts_is_rejected(folder: RunFolder, number: int) -> None:
    tracker = MemoryStore()

    def fail(name: str, argument: object) -> None:
        if name == "log_pictures":
            raise OSError(number, os.strerror(number))

    tracker.fail = fail
    append(folder, started(), taken(folder, 5, one_picture()), saved(folder, 6), ended())
    state = delivered(folder, tracker).state
    assert state.problems.rejected == 1 and os.strerror(number) in state.problems.reasons[0]
    assert list(tracker.checkpoints) == [6]


def test_paths_that_are_not_files_are_rejected(folder: RunFolder) -> None:
    (folder.pictures / "folder").mkdir(parents=True)
    os.mkfifo(folder.pictures / "fifo")
    paths = [
        "pictures/folder",
        "pictures/fifo",
        "pictures/a\0b",
        "pictures/\ud800",
        "pictures/" + "x" * 300,
    ]
    append(
        folder,
        started(),
        *(PicturesTaken(T0 + n, n, path) for n, path in enumerate(paths)),
        ended(),
    )
    tracker = MemoryStore()
    state = delivered(folder, tracker).state
    assert state.problems.rejected == 4, state.problems.reasons
    assert (folder.pictures / "folder").is_dir() and tracker.status == "FINISHED"

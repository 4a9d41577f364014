"""Pictures as PNGs, and their way to MLflow: once, again after a crash, and never what is none of ours."""

from __future__ import annotations

import errno
import io
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rankzero.events import PicturesTaken
from rankzero.faults import NeverAccepted
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.client.images import write_image
from rankzero.reporting import image_grids
from rankzero.run_store import picture_files
from rankzero.run_store.folder import RunFolder
from support.fake_tracker import FakeTracker, delivered
from support.runs import T0, append, ended, make_folder, saved, started

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path)


def arrays(classes: int = 3, mistakes: int = 5, **others: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "samples": np.int64(40),
        "total": np.int64(80),
        "wrong": np.int64(mistakes),
        "cut": np.bool_(False),
        "mistakes": random.integers(0, 256, (mistakes, 6, 6, 3)).astype(np.uint8),
        "mistakes_true": np.arange(mistakes) % classes,
        "mistakes_predicted": np.ones(mistakes, int),
        "mistakes_confidence": np.full(mistakes, 0.5),
        "confusion": random.integers(0, 9, (classes, classes)),
        "batch": np.zeros((16, 6, 6, 1), np.uint8),
        "batch_labels": np.zeros(16, int),
        "classes": np.array(["a $very$ long name of a class \\frac", "b", "c"], "U"),
        "own_names": np.array([], "U"),
        **others,
    }


def taken(folder: RunFolder, step: int, content: dict[str, Any] | bytes) -> PicturesTaken:
    path = folder.pictures / f"step_{step:08d}.npz"
    if isinstance(content, bytes):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    else:
        picture_files.write(path, content)
    return PicturesTaken(T0 + step, step, f"pictures/{path.name}")


@pytest.mark.parametrize("classes", [2, 10, 30, 31, 400])
@pytest.mark.parametrize("mistakes", [0, 1, 4, 16])
def test_every_number_of_classes_and_mistakes_can_be_drawn(
    tmp_path: Path, classes: int, mistakes: int
) -> None:
    if mistakes != 4 and classes != 10:
        classes = 2
    drawn = image_grids.draw(arrays(classes, mistakes), 7, tmp_path)
    assert list(drawn) == ["hardest_mistakes", "confusion_matrix", "training_batch"]
    for path in drawn.values():
        with Image.open(path) as image:
            assert image.format == "PNG" and 300 < image.width < 1600 and 200 < image.height < 1600


@pytest.mark.parametrize("picture", [image_grids._mistakes, image_grids._confusion])
def test_outputs_of_classes_without_names_are_said_to_be_a_guess(picture: Any) -> None:
    found = arrays(
        samples=np.int64(65_536),
        wrong=np.int64(65_000),
        total=np.int64(120_000),
        cut=np.bool_(True),
    )
    for classes, says in ((["a", "b", "c"], False), ([], True)):
        figure = picture(found, classes, 1_200_000)
        texts = [
            text.get_text() for text in (*figure.texts, *(axes.xaxis.label for axes in figure.axes))
        ]
        assert any(image_grids.GUESSED in text for text in texts) == says
        if picture is image_grids._mistakes:
            assert figure.texts[1].get_window_extent().x1 < figure.bbox.width


def test_own_images_keep_their_pixels_and_names_stay_apart(tmp_path: Path) -> None:
    own = {"own_names": np.array(["a/b:c", "a/b_c", "confusion_matrix", "../../up"], "U")}
    own |= {f"own_{number}": np.full((300, 200, 3), number, np.uint8) for number in range(4)}
    drawn = image_grids.draw(arrays(**own), 7, tmp_path)
    assert len(drawn) == 7 and all(".." not in key and not key.startswith("/") for key in drawn)
    with Image.open(next(path for key, path in drawn.items() if key.endswith("up"))) as image:
        assert image.size == (200, 300) and image.getpixel((0, 0)) == (3, 3, 3)


def test_pictures_are_delivered_and_what_they_were_drawn_from_goes(folder: RunFolder) -> None:
    tracker = FakeTracker()
    append(folder, started(), taken(folder, 5, arrays()), taken(folder, 9, arrays()), ended())
    deliverer = delivered(folder, tracker)
    keys = ["confusion_matrix", "hardest_mistakes", "training_batch"]
    assert sorted(tracker.pictures) == [
        (key, step, int((T0 + step) * 1000)) for key in keys for step in (5, 9)
    ]
    assert not list(folder.pictures.iterdir()) and not deliverer.progress.rejected
    assert tracker.status == "FINISHED"


def test_a_replay_after_a_crash_finds_them_delivered(folder: RunFolder) -> None:
    tracker = FakeTracker()
    append(folder, started(), taken(folder, 5, arrays()), ended())
    delivered(folder, tracker)
    before = dict(tracker.pictures)
    (folder.path / "delivery.json").unlink()
    assert not delivered(folder, tracker).progress.rejected
    assert tracker.pictures == before


def test_a_store_that_is_away_gets_them_later(folder: RunFolder) -> None:
    tracker, fails = FakeTracker(), iter([True, True, False])

    def fail(name: str, argument: object) -> None:
        if name == "log_pictures" and next(fails):
            raise ConnectionError("away")

    tracker.fail = fail
    append(folder, started(), taken(folder, 5, arrays()), ended())
    delivered(folder, tracker)
    assert len(tracker.pictures) == 3 and not list(folder.pictures.iterdir())


def pickled() -> bytes:
    content = io.BytesIO()
    np.savez(content, mistakes=np.array([print], dtype=object))
    return content.getvalue()


def bomb() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("confusion.npy", bytes(picture_files.MAX_BYTES + (1 << 20)))
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
def test_what_is_none_of_ours_is_set_aside(
    folder: RunFolder, content: dict[str, Any] | bytes
) -> None:
    tracker = FakeTracker()
    append(folder, started(), taken(folder, 5, content), ended())
    progress = delivered(folder, tracker).progress
    assert progress.rejected == 1 and "pictures of step 5" in progress.reasons[0]
    assert not tracker.pictures and tracker.status == "FINISHED"


def test_a_bomb_is_not_unpacked(folder: RunFolder) -> None:
    event = taken(folder, 5, bomb())
    with pytest.raises(ValueError, match="more than was written"):
        picture_files.read(folder.path / event.path)


@pytest.mark.parametrize(
    "path", ["../victim.npz", "/etc/hostname", "pictures/link.npz", "pictures", "run.json"]
)
def test_nothing_outside_of_the_folder_is_read_or_deleted(folder: RunFolder, path: str) -> None:
    victim = folder.path.parent / "victim.npz"
    picture_files.write(victim, arrays())
    folder.pictures.mkdir()
    (folder.pictures / "link.npz").symlink_to(victim)
    append(folder, started(), PicturesTaken(T0, 5, path), ended())
    tracker = FakeTracker()
    progress = delivered(folder, tracker).progress
    assert progress.rejected == 1 and "leads out" in progress.reasons[0]
    assert not tracker.pictures and victim.exists() and (folder.path / "run.json").exists()


WANTS = [
    OSError(errno.ENOSPC, "no space"),
    MemoryError(),
    OSError(errno.EMFILE, "files"),
    OSError(errno.ESTALE, "gone"),
]


@pytest.mark.parametrize("want", WANTS, ids=repr)
@pytest.mark.parametrize("place", ["draw", "read", "load"])
def test_what_the_machine_lacks_costs_no_pictures(
    folder: RunFolder, want: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = {"draw": image_grids, "read": zipfile, "load": np}[place]
    name = {"draw": "draw", "read": "ZipFile", "load": "load"}[place]
    real, fails = getattr(owner, name), iter([True, True])

    def lacking(*given: Any, **named: Any) -> Any:
        if next(fails, False):
            raise want
        return real(*given, **named)

    event = taken(folder, 5, arrays())
    monkeypatch.setattr(owner, name, lacking)
    append(folder, started(), event, ended())
    tracker = FakeTracker()
    progress = delivered(folder, tracker).progress
    assert len(tracker.pictures) == 3 and not progress.rejected and progress.failures == 2


def test_an_upload_that_asks_for_more_memory_than_there_is_holds_nothing_up(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*given: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(image_grids, "draw", lacking)
    append(folder, started(), taken(folder, 5, arrays()), saved(folder, 6), ended())
    tracker = FakeTracker()
    progress = delivered(folder, tracker).progress
    assert progress.rejected == 1 and "not enough memory" in progress.reasons[0]
    assert list(tracker.checkpoints) == [6] and list(folder.pictures.iterdir()), (
        "what it is drawn from stays"
    )


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EISDIR, errno.EINVAL])
def test_what_no_file_system_takes_is_set_aside(folder: RunFolder, number: int) -> None:
    tracker = FakeTracker()

    def fail(name: str, argument: object) -> None:
        if name == "log_pictures":
            raise OSError(number, os.strerror(number))

    tracker.fail = fail
    append(folder, started(), taken(folder, 5, arrays()), saved(folder, 6), ended())
    progress = delivered(folder, tracker).progress
    assert progress.rejected == 1 and os.strerror(number) in progress.reasons[0]
    assert list(tracker.checkpoints) == [6]


def test_a_folder_and_names_that_no_file_has_are_set_aside(folder: RunFolder) -> None:
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
    tracker = FakeTracker()
    progress = delivered(folder, tracker).progress
    assert progress.rejected == 4, progress.reasons
    assert (folder.pictures / "folder").is_dir() and tracker.status == "FINISHED"


def test_an_array_that_claims_more_than_its_file_is_no_want_of_memory(folder: RunFolder) -> None:
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


def test_an_image_that_cannot_be_made_smaller_is_impossible(tmp_path: Path, sqlite: str) -> None:
    (tmp_path / "big.png").write_bytes(b"no picture")
    with pytest.raises(NeverAccepted, match="own: UnidentifiedImageError"):
        MlflowRuns(sqlite).log_pictures("run", {"own": tmp_path / "big.png"}, 7, 1234)


@pytest.mark.parametrize("key", ["漢" * 85, "a" * 250, "pictures/" + "ü" * 120])
def test_files_of_long_names_can_be_written(tmp_path: Path, key: str) -> None:
    Image.new("RGB", (20, 10)).save(tmp_path / "one.png")
    for other in (key, f"{key}x"):
        write_image(tmp_path / "one.png", tmp_path, "r" * 32, other, 2**63 - 1, 10**15 - 1)
    names = [path.name for path in (tmp_path / "images").iterdir()]
    assert len(names) == 4 and max(len(name.encode()) for name in names) <= 255
    assert len(list((tmp_path / "pictures").iterdir())) == 2


def test_too_large_pictures_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too large"):
        picture_files.write(tmp_path / "x.npz", {"big": np.zeros(1001, np.uint8)}, max_bytes=1000)
    assert not list(tmp_path.iterdir())


def litter(folder: RunFolder) -> dict[str, Path]:
    """Leave what a killed writer leaves, and what is none of ours."""
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


def test_what_a_killed_writer_left_goes_and_nothing_else_does(folder: RunFolder) -> None:
    left = litter(folder)
    named = folder.pictures / "step_00000005_1800000000000.npz"
    picture_files.write(named, arrays())
    append(folder, started(), PicturesTaken(T0, 5, f"pictures/{named.name}"))
    picture_files.clear(folder)
    assert set(folder.pictures.iterdir()) == {named, left["theirs"], left["folder"]}


def test_a_folder_of_pictures_that_is_elsewhere_is_left_alone(
    folder: RunFolder, tmp_path: Path
) -> None:
    elsewhere = make_folder(tmp_path / "elsewhere")
    left = litter(elsewhere)
    folder.pictures.symlink_to(elsewhere.pictures)
    picture_files.clear(folder)
    assert set(elsewhere.pictures.iterdir()) == set(left.values())


def test_files_are_named_as_mlflow_names_them_and_the_same_again(tmp_path: Path) -> None:
    Image.new("RGB", (2000, 1000)).save(tmp_path / "one.png")
    (tmp_path / "ours").mkdir()
    for _ in range(2):
        write_image(tmp_path / "one.png", tmp_path / "ours", "run", "a/b", 7, 1234)
    tags = logged_by_mlflow(tmp_path / "one.png", tmp_path, "pictures/a/b", 7, 1234)
    theirs = sorted(path.name for path in (tmp_path / "theirs").rglob("*+step+*"))
    ours = sorted(path.name for path in (tmp_path / "ours" / "images").iterdir())
    assert len(theirs) == len(ours) == 2, "written again, they are the same files"
    for one, other in zip(ours, theirs, strict=True):
        assert one.split("+")[:5] == other.split("+")[:5] and len(one) == len(other)
        assert one.endswith("+compressed.webp") == other.endswith("+compressed.webp")
    assert tags["mlflow.loggedImages"] == "True"


def logged_by_mlflow(
    path: Path, folder: Path, key: str, step: int, milliseconds: int
) -> dict[str, str]:
    """Log an image with MLflow's own client, into ``theirs``; return the run's tags."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations among MLflow's dependencies
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
        experiment = client.create_experiment("e", artifact_location=str(folder / "theirs"))
        run = client.create_run(experiment)
        with Image.open(path) as image:
            client.log_image(
                run.info.run_id, image, key=key, step=step, timestamp=milliseconds, synchronous=True
            )
        tags: dict[str, str] = client.get_run(run.info.run_id).data.tags
        return tags

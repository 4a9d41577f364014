"""Artifact locations that MLflow answers with: no other file is overwritten or deleted."""

from __future__ import annotations

import contextlib
import errno
import shutil
import sqlite3
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow.exceptions import MlflowException
from PIL import Image

from rankzero.mlflow_store.client import MlflowRuns, RunRecord, artifact_locations
from rankzero.mlflow_store.client.artifact_locations import ArtifactLocations
from rankzero.permanent_errors import NeverAccepted
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.deliverer import Deliverer
from support.pictures import arrays, taken
from support.runs import T0, append, deleted, ended, make_folder, saved, started
from support.syncs import recorded

Lie = Callable[[Path, str], str]
ELSEWHERE: dict[str, Lie] = {
    "a folder": lambda mine, tail: str(mine),
    "its URI": lambda mine, tail: f"file://{mine}",
    "its address": lambda mine, tail: f"file:{mine}",
    "quoted": lambda mine, tail: (
        f"file://{urllib.parse.quote(urllib.parse.quote(str(mine), safe=''))}"
    ),
    "up": lambda mine, tail: f"{mine}/{tail}/../../..",
    "another experiment's": lambda mine, tail: f"{mine}/{tail}",
    "a model of another": lambda mine, tail: f"{mine}/models/m-{'0' * 32}/artifacts",
    "asked again": lambda mine, tail: f"runs:/{tail}",
    "a model's": lambda mine, tail: f"models:/{tail}",
    "a file that cannot be": lambda mine, tail: f"{mine}/\x00/{tail}",
    "nothing": lambda mine, tail: "",
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which no run may touch."""
    folder = tmp_path / "mine"
    (folder / "study").mkdir(parents=True)
    (folder / "study" / "thesis.tex").write_text("mine")
    monkeypatch.chdir(folder)
    return folder


def untouched(mine: Path) -> bool:
    return [path.name for path in sorted(mine.rglob("*"))] == ["study", "thesis.tex"]


def plant(uri: str, statement: str, *values: str) -> None:
    with contextlib.closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database, database:
        assert database.execute(statement, values).rowcount == 1


def delivered(folder: RunFolder) -> Deliverer:
    deliverer = Deliverer(folder, 0, MlflowRuns)
    deliverer.hasten()
    for _ in range(100):
        if not deliverer.work() and deliverer.complete:
            return deliverer
    raise AssertionError(deliverer.state.retries.error)


def begun(root: Path, uri: str) -> tuple[RunFolder, MlflowRuns, RunRecord, str]:
    """Return a run with a checkpoint in MLflow, and the logged model's id."""
    folder, tracker = make_folder(root, uri), MlflowRuns(uri)
    run = tracker.open_run(folder.identity, T0)
    event = saved(folder, 4)
    append(folder, started(), event)
    return (
        folder,
        tracker,
        run,
        tracker.models.save_checkpoint(run, event, folder.path / event.path, lambda _: []),
    )


def test_an_uploaded_folder_keeps_the_mode_of_its_place(sqlite: str, tmp_path: Path) -> None:
    _, tracker, run, _ = begun(tmp_path, sqlite)
    location = tracker._locations.of_run(run.run_id)
    place = location.folder
    assert place is not None
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o755)
    private = tmp_path / "private"
    (private / "images").mkdir(parents=True)
    (private / "images" / "a.txt").write_text("a")
    private.chmod(0o700)
    location.upload_folder(private)
    assert (place / "images" / "a.txt").read_text() == "a"
    assert place.stat().st_mode & 0o777 == 0o755, "other users of the store read it"


def test_an_upload_keeps_the_number_of_its_error(sqlite: str, tmp_path: Path) -> None:
    _, tracker, run, _ = begun(tmp_path, sqlite)
    location = tracker._locations.of_run(run.run_id)
    assert location.folder is not None
    location.folder.mkdir(parents=True, exist_ok=True)
    (location.folder / "images").write_text("a file where a folder belongs")
    (tmp_path / "new" / "images").mkdir(parents=True)
    (tmp_path / "new" / "images" / "a.txt").write_text("a")
    # By the number, the courier tells a lack of space from a name that can never be written.
    with pytest.raises(FileExistsError):
        location.upload_folder(tmp_path / "new")


def test_a_folder_that_retention_deleted_leaves_nothing_behind(sqlite: str, tmp_path: Path) -> None:
    _, tracker, run, _ = begun(tmp_path, sqlite)
    location = tracker._locations.of_run(run.run_id)
    assert location.folder is not None and not location.folder.exists()
    with pytest.raises(FileNotFoundError):
        location.upload_folder(tmp_path / "deleted")
    assert not location.folder.exists()


def test_what_is_copied_into_the_embedded_store_is_synced_with_its_folders(
    sqlite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = recorded(monkeypatch)
    folder, tracker, run, model_id = begun(tmp_path, sqlite)
    order_of_model, [place] = list(order), tmp_path.glob(f"artifacts/*/models/{model_id}/artifacts")
    files = [path for path in place.rglob("*") if path.is_file()]
    folders = [place / "ranks", place, *place.parents[:5]]
    assert set(order_of_model) >= {*files, *folders} and folders[-1] == tmp_path
    first = order_of_model.index(place / "ranks")
    assert {order_of_model.index(path) < first for path in files} == {True}
    for number in range(2):
        order.clear()
        tracker.log_artifact(run.run_id, folder.path / "run.json", "sub")
        [file] = tmp_path.glob(f"artifacts/*/{run.run_id}/artifacts/sub/run.json")
        above = [*file.parents[:2], *(() if number else file.parents[2:6])]
        assert order == [file, *above], "the folders above the run's once"


def test_pictures_are_on_the_disk_before_their_arrays_are_deleted(
    sqlite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, failures = make_folder(tmp_path, sqlite), iter([True])
    append(folder, started(), taken(folder, 5, arrays()), ended())
    source, delivery, there = folder.pictures / "step_00000005.npz", list[Path](), list[bool]()

    def see(path: Path) -> None:
        if path.suffix in (".png", ".webp"):
            there.append(source.exists() and not delivery)
            if next(failures, False):
                raise OSError(errno.EIO, "Input/output error")
        elif not source.exists():
            delivery.append(path)

    order = recorded(monkeypatch, see)
    deliverer = Deliverer(folder, 0, MlflowRuns, longest_wait=0.0)
    deliverer.hasten()
    while deliverer.work() or not deliverer.complete:
        pass
    images = {path for path in tmp_path.glob("artifacts/*/*/artifacts/*/*") if path.suffix != ".md"}
    assert {path for path in images if path.suffix in (".png", ".webp")} <= set(order)
    assert len(there) >= 18 and all(there), "tried again after the error, and only then deleted"
    assert deliverer.state.retries.failures == 1 and not deliverer.state.problems.rejected
    assert delivery and not source.exists()


def test_nothing_is_synced_for_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[str] = []
    repository: Any = SimpleNamespace(
        log_artifact=lambda path, below: uploaded.append(path),
        log_artifacts=uploaded.append,
    )
    location = artifact_locations._ArtifactLocation(repository, None)
    (tmp_path / "a.txt").write_text("a")
    order = recorded(monkeypatch)
    location.upload_file(tmp_path / "a.txt")
    location.upload_folder(tmp_path)
    assert len(uploaded) == 2 and not order


def test_only_a_place_that_does_not_answer_holds_up_a_deletion(
    caplog: pytest.LogCaptureFixture,
) -> None:
    away, forbidden = ConnectionError("away"), MlflowException("forbidden, or no such file")
    deletes, lists = Mock(), Mock()
    repository: Any = SimpleNamespace(
        delete_artifacts=deletes, list_artifacts=lists, artifact_uri="s3://bucket/m-1"
    )
    delete = artifact_locations._ArtifactLocation(repository, None).delete
    # There is none; all is deleted at the second try; Azure's Data Lake cannot; it is not allowed.
    deletes.side_effect = [forbidden, away, None, NotImplementedError(), forbidden, forbidden]
    lists.side_effect = [[], ["file"], ["file"]]
    for expected in (1, 3, 4):
        delete()
        assert deletes.call_count == expected and not caplog.messages
    delete(may_stay=True)
    assert caplog.messages == ["deleted files stay: s3://bucket/m-1: forbidden, or no such file"]
    deletes.side_effect, lists.side_effect = [forbidden] * 3, [["file"], away]
    with pytest.raises(MlflowException):
        delete()
    with pytest.raises(ConnectionError):
        delete(may_stay=True)


@pytest.mark.parametrize("lie", ELSEWHERE)
def test_nothing_is_deleted_where_a_model_cannot_be(
    lie: str, sqlite: str, mine: Path, tmp_path: Path
) -> None:
    folder, tracker, run, model_id = begun(tmp_path, sqlite)
    place = ELSEWHERE[lie](mine, f"models/{model_id}/artifacts")
    plant(
        sqlite, "UPDATE logged_models SET artifact_location = ? WHERE model_id = ?", place, model_id
    )
    with pytest.raises(NeverAccepted, match="nothing is written or deleted there"):
        tracker.models.delete_checkpoint(model_id)
    append(folder, deleted(4), ended())
    progress = delivered(folder).state
    assert progress.queue.ended and progress.problems.rejected >= 1 and untouched(mine)
    assert "MLflow answers that files lie" in tracker.find_run(run.run_id).tags["rankzero.rejected"]


@pytest.mark.parametrize("lie", ELSEWHERE)
def test_no_checkpoint_is_written_where_a_model_cannot_be(
    lie: str, sqlite: str, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tracker, run, _ = begun(tmp_path, sqlite)

    def create(*args: Any, **options: Any) -> Any:
        model = real(*args, **options)
        model._artifact_location = ELSEWHERE[lie](mine, f"models/{model.model_id}/artifacts")
        return model

    real = tracker._client.create_logged_model
    monkeypatch.setattr(tracker._client, "create_logged_model", create)
    with pytest.raises(NeverAccepted, match="nothing is written or deleted there"):
        tracker.models.log_model(run, tmp_path / "runs", "model", 1, {})
    assert untouched(mine)


@pytest.mark.parametrize("lie", ELSEWHERE)
def test_no_artifact_is_written_where_a_run_cannot_have_any(
    lie: str, sqlite: str, mine: Path, tmp_path: Path
) -> None:
    folder, tracker, run, _ = begun(tmp_path, sqlite)
    place = ELSEWHERE[lie](mine, f"{run.run_id}/artifacts")
    plant(sqlite, "UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", place, run.run_id)
    (folder.artifacts / ".ssh").mkdir(parents=True)
    (folder.artifacts / ".ssh" / "authorized_keys").write_text("evil")
    append(folder, ended())
    progress = delivered(folder).state
    assert progress.queue.ended and progress.problems.rejected >= 1 and untouched(mine)
    assert "MLflow answers that files lie" in tracker.find_run(run.run_id).tags["rankzero.rejected"]


def test_a_run_with_an_id_that_mlflow_does_not_give_has_no_location(
    sqlite: str, mine: Path, tmp_path: Path
) -> None:
    _, tracker, run, _ = begun(tmp_path, sqlite)
    plant(
        sqlite,
        "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?",
        "/",
        run.experiment_id,
    )
    (mine / "study" / "artifacts").mkdir()
    row = ("study", f"{mine}/study/artifacts", run.run_id)
    plant(sqlite, "UPDATE runs SET run_uuid = ?, artifact_uri = ? WHERE run_uuid = ?", *row)
    with pytest.raises(NeverAccepted, match="nothing is written or deleted there"):
        tracker.log_artifact("study", mine / "study" / "thesis.tex")


@pytest.mark.parametrize("depth", range(3))
def test_a_model_is_not_deleted_through_a_link(
    depth: int, sqlite: str, mine: Path, tmp_path: Path
) -> None:
    _, tracker, _, model_id = begun(tmp_path, sqlite)
    place = Path(tracker._client.get_logged_model(model_id).artifact_location)
    link = [place, *place.parents][depth]
    shutil.rmtree(link)
    link.symlink_to(mine)
    target = mine / place.relative_to(link)
    target.mkdir(parents=True, exist_ok=True)
    (target / "kept").touch()
    with pytest.raises(NeverAccepted, match="nothing is written or deleted there"):
        tracker.models.delete_checkpoint(model_id)
    assert (target / "kept").exists()


def test_an_artifact_is_not_written_through_a_link(sqlite: str, mine: Path, tmp_path: Path) -> None:
    folder, tracker, run, _ = begun(tmp_path, sqlite)
    tracker.log_artifact(run.run_id, folder.path / "run.json", "sub")
    [place] = tmp_path.glob(f"artifacts/*/{run.run_id}/artifacts")
    shutil.rmtree(place / "sub")
    (place / "sub").symlink_to(mine)
    (place / "run.json").symlink_to(mine / "study" / "thesis.tex")
    for below in ("sub", None):
        with pytest.raises(NeverAccepted, match="by a link"):
            tracker.log_artifact(run.run_id, folder.path / "run.json", below)
    (place / "pictures").symlink_to(mine)
    picture = tmp_path / "picture.png"
    Image.new("RGB", (4, 4)).save(picture)
    with pytest.raises(NeverAccepted, match="by a link"):
        tracker.log_pictures(run.run_id, {"mistakes": picture}, 1, 0)
    assert untouched(mine) and (mine / "study" / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("name", ["a#1.txt", "why?.txt", "%41.txt"])
def test_name_that_a_server_would_change_is_refused(name: str, tmp_path: Path) -> None:
    run = SimpleNamespace(run_id="0" * 32, experiment_id="1", artifact_uri="mlflow-artifacts:/1/x")
    client: Any = SimpleNamespace(get_run=lambda _: SimpleNamespace(info=run))
    location = ArtifactLocations(client, "http://127.0.0.1:9").of_run(run.run_id)
    with pytest.raises(NeverAccepted, match="a server cannot get a name"):
        location.upload_file(tmp_path / name)


@pytest.mark.parametrize("where", ["{}", "file://{}", "file:{}", "."])
def test_a_run_has_artifacts_wherever_its_experiment_has_them(
    where: str, sqlite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experiment was created through MLflow, in a folder, at a URI or in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "./theirs")
    root = tmp_path / "an experiment's, größer"
    quoted = urllib.parse.quote(str(root)) if where.startswith("file") else str(root)
    MlflowRuns(sqlite)._client.create_experiment(
        "tests", None if where == "." else where.format(quoted)
    )
    folder, tracker, run, model_id = begun(tmp_path, sqlite)
    tracker.log_artifact(run.run_id, folder.path / "run.json")
    [artifact] = tmp_path.rglob(f"{run.run_id}/artifacts/run.json")
    [checkpoint] = tmp_path.rglob(f"models/{model_id}/artifacts/state.pt")
    assert where == "." or (artifact.is_relative_to(root) and checkpoint.is_relative_to(root))
    assert tracker.download_artifact(run.run_id, "run.json", tmp_path / "runs").exists()
    tracker.models.delete_checkpoint(model_id)
    assert not checkpoint.exists()


def test_the_artifact_folder_itself_may_be_a_link(sqlite: str, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "artifacts").symlink_to(tmp_path / "disk")
    folder, tracker, run, model_id = begun(tmp_path, sqlite)
    tracker.log_artifact(run.run_id, folder.path / "run.json")
    tracker.models.delete_checkpoint(model_id)
    assert list((tmp_path / "disk").rglob("run.json")) and not list(
        (tmp_path / "disk").rglob("state.pt")
    )

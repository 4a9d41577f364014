"""`rankzero relocate`: a store that was moved or copied has its artifacts again."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

from rankzero.catalog.lookup import mlflow_id
from rankzero.cli.commands import doctor
from rankzero.cli.main import main
from rankzero.housekeeping import relocation
from rankzero.mlflow_store import server, uris
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store.attempt import sole_launcher
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import open_run, sync
from support.runs import append, ended, make_folder, saved, started, steps
from support.stores import copied

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def project(tmp_path: Path, empty_database: Path) -> Path:
    """A folder with an experiment's file, and a store with a delivered and registered run."""
    project = tmp_path / "vorher"
    root = project / "mlruns"
    root.mkdir(parents=True)
    (project / "own.py").touch()
    copied(empty_database, root)
    add_run(root, "one")
    store = MlflowRuns(uris.default_tracking_uri(root))
    run = store.find_run(mlflow_id(RunFolder(root / "runs" / "one")) or "")
    model, *_ = store.models.of_run(run)
    store.models.register(run, model.model_id, "digits")
    return project


def add_run(root: Path, name: str, *, deliver: bool = True) -> RunFolder:
    uri = uris.default_tracking_uri(root)
    places = {"artifact_root": uris.artifact_root(uri), "project_dir": str(root.parent)}
    file = f"{root.parent / 'own.py'}:Own"
    folder = make_folder(root, uri, name=name, experiment_file=file, **places)
    folder.artifacts.mkdir()
    (folder.artifacts / "notes.txt").write_text(name)
    append(folder, started(), steps(1, 5), saved(folder, 5), ended())
    assert not deliver or sync.deliver(folder).complete
    return folder


def fetched(root: Path, name: str, to: Path) -> list[str]:
    """The files that MLflow finds for a run and its models."""
    store = MlflowRuns(uris.default_tracking_uri(root))
    run_id = mlflow_id(RunFolder(root / "runs" / name)) or ""
    store.download_artifacts(run_id, to / "artifacts")
    for model in store.models.of_run(store.find_run(run_id)):
        store.models.download_checkpoint(model.model_id, to / model.name)
    return sorted(path.name for path in to.rglob("*") if path.is_file())


def relocated(root: Path) -> int:
    return main(["relocate", "--dir", str(root)])


def content(folder: Path) -> dict[str, bytes]:
    # The database's write-ahead log is a process's own.
    files = (path for path in folder.rglob("*") if path.is_file() and "mlflow.db-" not in path.name)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def mentions(root: Path, text: str) -> list[str]:
    """The rows of MLflow's database that have a text, but for where a run was started."""
    with sqlite3.connect(root / "mlflow.db") as database:
        lines = [line for line in database.iterdump() if text in line]
    return [line for line in lines if "mlflow.source.name" not in line]


def test_moved_project_has_its_artifacts_again(
    project: Path, tmp_path: Path, capsys: Printed
) -> None:
    before = fetched(project / "mlruns", "one", tmp_path / "before")
    root = project.rename(tmp_path / "nachher in Köln #2").joinpath("mlruns")
    assert main(["runs", "--dir", str(root)]) == 0
    assert capsys.readouterr().err.count(f"relocate --dir '{root}'") == 1
    assert "relocate" in (doctor.tracking_store(root).fix or "")
    assert relocated(root) == 0
    assert f"before: {project / 'mlruns'}\n" in capsys.readouterr().out
    assert "state.pt" in before and fetched(root, "one", tmp_path / "after") == before
    assert mentions(root, "vorher") == [] and not project.exists()
    identity = RunFolder(root / "runs" / "one").identity
    assert identity.experiment_file == f"{root.parent / 'own.py'}:Own"
    assert identity.tracking_uri == uris.default_tracking_uri(root)
    assert main(["runs", "--dir", str(root)]) == 0 and "relocate" not in capsys.readouterr().err
    # New runs of the experiment are here, too.
    add_run(root, "two")
    assert "notes.txt" in fetched(root, "two", tmp_path / "two") and not project.exists()
    assert relocated(root) == 0 and "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("as_uri", [False, True])
def test_experiments_that_mlflow_made_are_relocated(
    project: Path, tmp_path: Path, as_uri: bool, capsys: Printed
) -> None:
    root = project / "mlruns"
    # MLflow's own place for a second experiment, with ./mlruns below the current folder.
    place = root / "2"
    client = MlflowRuns(uris.default_tracking_uri(root))._client
    made = client.create_experiment("notebook", place.as_uri() if as_uri else str(place))
    run = client.create_run(made)
    client.log_text(run.info.run_id, "hello", "notes.txt")
    assert (place / run.info.run_id / "artifacts" / "notes.txt").exists()
    shutil.rmtree(root / "artifacts")  # the store has nothing but MLflow's experiment
    moved = project.rename(tmp_path / "nachher") / "mlruns"
    main(["runs", "--dir", str(moved)])
    assert "relocate" in capsys.readouterr().err
    assert relocated(moved) == 0 and mentions(moved, "vorher") == []
    client = MlflowRuns(uris.default_tracking_uri(moved))._client
    assert [one.path for one in client.list_artifacts(run.info.run_id)] == ["notes.txt"]


def test_copy_of_a_store_is_its_own_and_leaves_the_original_alone(
    project: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(project, tmp_path / "kopie") / "mlruns"
    original = content(project)
    assert relocated(root) == 0 and content(project) == original
    shutil.rmtree(project)
    assert "notes.txt" in fetched(root, "one", tmp_path / "files")
    assert mentions(root, "vorher") == []


@pytest.mark.parametrize(
    ("was_online", "leaves"), [(True, "nothing"), (False, "nothing"), (False, "a copy")]
)
def test_run_of_a_moved_store_is_delivered_to_its_own_database(
    was_online: bool, leaves: str, project: Path, tmp_path: Path, capsys: Printed
) -> None:
    if not was_online:
        shutil.rmtree(project / "mlruns")
    add_run(project / "mlruns", "late", deliver=False)
    original, root = content(project), tmp_path / "nachher" / "mlruns"
    (shutil.copytree if leaves == "a copy" else shutil.move)(project, root.parent)
    for words in (["sync"], ["sync", "late"]):
        assert main([*words, "--dir", str(root)]) == 1
        assert f"relocate --dir {root}" in capsys.readouterr().out
    assert (content(project) if project.exists() else original) == original
    assert project.exists() == (leaves == "a copy")
    assert relocated(root) == 0 and main(["sync", "--dir", str(root)]) == 0
    assert "notes.txt" in fetched(root, "late", tmp_path / "files")
    assert (content(project) if project.exists() else original) == original


def test_a_share_that_is_away_is_no_moved_store(tmp_path: Path) -> None:
    for place, moved in (("share/team", False), ("share/mlruns", True), ("project/x", True)):
        uri = uris.default_tracking_uri(tmp_path / place)
        folder = make_folder(tmp_path / "mlruns", uri, project_dir=str(tmp_path / "project"))
        assert (open_run.former_store(folder) is not None) == moved, place


def test_relocation_that_was_killed_is_finished_by_the_next(project: Path, tmp_path: Path) -> None:
    root = project.rename(tmp_path / "nachher") / "mlruns"
    # All of the runs, and nothing of the database.
    assert relocation._rewrite(RunFolder(root / "runs" / "one"), [project / "mlruns"], root)
    assert relocated(root) == 0 and mentions(root, "vorher") == []


def test_store_that_is_used_is_not_relocated(
    project: Path, tmp_path: Path, capsys: Printed
) -> None:
    root = project.rename(tmp_path / "nachher") / "mlruns"
    identity = RunFolder(root / "runs" / "one").identity
    with sole_launcher(RunFolder(root / "runs" / "one"), machines=1):
        assert relocated(root) == 2 and "one runs" in capsys.readouterr().err
    with server.shared(root):
        assert relocated(root) == 2 and "rankzero ui" in capsys.readouterr().err
    assert mentions(root, "vorher") and RunFolder(root / "runs" / "one").identity == identity


def test_files_that_are_in_the_former_place_alone_are_named(
    project: Path, tmp_path: Path, capsys: Printed
) -> None:
    root = shutil.copytree(project, tmp_path / "kopie") / "mlruns"
    # A training in the copy: MLflow writes into the original.
    late = add_run(root, "late")
    assert relocated(root) == 2
    command = capsys.readouterr().err.rpartition(": ")[2].strip()
    assert command.startswith("cp -Rn")
    subprocess.run(shlex.split(command), check=False)
    assert relocated(root) == 0 and late.identity.experiment_file
    shutil.rmtree(project)
    assert "notes.txt" in fetched(root, "late", tmp_path / "files")


def test_of_two_former_places_the_lower_one_counts() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE runs AS SELECT 'file:///a/b/artifacts/1' AS artifact_uri")
        found = [*relocation._changes(database, [Path("/a"), Path("/a/b")], Path("/new"))]
    assert [one.new for one in found] == ["file:///new/artifacts/1"]


def test_links_and_places_that_a_user_chose_are_left_alone(
    project: Path, tmp_path: Path, capsys: Printed
) -> None:
    chosen = tmp_path / "big" / "artifacts" / "chosen"
    root = project / "mlruns"
    MlflowRuns(uris.default_tracking_uri(root))._client.create_experiment("chosen", str(chosen))
    (tmp_path / "link").symlink_to(project)
    main(["runs", "--dir", str(tmp_path / "link" / "mlruns")])
    assert "relocate" not in capsys.readouterr().err
    folder = make_folder(root, "http://127.0.0.1:9", name="elsewhere")
    before = dataclasses.asdict(folder.identity)
    moved = project.rename(tmp_path / "nachher") / "mlruns"
    assert relocated(moved) == 0 and mentions(moved, str(chosen))
    assert dataclasses.asdict(RunFolder(moved / "runs" / "elsewhere").identity) == before

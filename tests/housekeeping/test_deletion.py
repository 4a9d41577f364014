"""`rankzero delete` and `prune`: what they take, what they leave, and what brings it back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from mlflow.entities.model_registry import ModelVersion

from rankzero.catalog import deleted, lookup
from rankzero.catalog.lookup import mlflow_id
from rankzero.cli.housekeeping import delete as delete_command
from rankzero.cli.main import main
from rankzero.errors import FAILED, UserError
from rankzero.events import Event
from rankzero.housekeeping.deletion import Housekeeper, alone, mark
from rankzero.mlflow_store import uris
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.client.deletion import MlflowDeletion
from rankzero.mlflow_store.client.models import MlflowModels
from rankzero.run_store import removal, run_locks
from rankzero.run_store.attempt import sole_launcher
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync
from rankzero.tuning.options import default_storage
from rankzero.tuning.study import open_study
from support.runs import append, ended, evaluated, make_folder, saved, started, steps
from support.stores import Server, copied

Here = Callable[..., tuple[int, str]]


@pytest.fixture
def root(tmp_path: Path, empty_database: Path) -> Path:
    """The folder of an embedded store."""
    (tmp_path / "mlruns").mkdir()
    copied(empty_database, tmp_path / "mlruns")
    return tmp_path / "mlruns"


@pytest.fixture
def here(root: Path, capsys: pytest.CaptureFixture[str]) -> Here:
    """Run a command on the store; return its exit code and what it printed."""

    def run(*words: object) -> tuple[int, str]:
        code = main([*map(str, words), "--dir", str(root)])
        captured = capsys.readouterr()
        return code, captured.err + captured.out

    return run


def finished(
    root: Path, name: str, *more: Event, deliver: bool = True, **changes: str
) -> RunFolder:
    """A run that has ended, with a checkpoint of a megabyte; delivered."""
    uri = uris.default_tracking_uri(root)
    artifacts = uris.artifact_root(uri)
    folder = make_folder(root, uri, name=name, artifact_root=artifacts, **changes)
    folder.artifacts.mkdir()
    (folder.artifacts / "notes.txt").write_text(name)
    append(folder, started(), steps(1, 5), saved(folder, 5, size=1_000_000), *more, ended())
    if deliver:
        assert sync.deliver(folder).complete
    return folder


def names(root: Path, *, among_deleted: bool = False) -> set[str]:
    return {run.name for run in lookup.listed(root / "runs", among_deleted=among_deleted)}


def store(root: Path) -> MlflowRuns:
    return MlflowRuns(uris.default_tracking_uri(root))


def client(root: Path) -> object:
    return store(root)._client


def test_run_that_is_deleted_in_mlflow_is_listed_again_when_it_is_restored_there(
    root: Path, here: Here
) -> None:
    run_id = mlflow_id(finished(root, "one"))
    assert run_id is not None
    finished(root, "two")
    store(root).deletion.delete(run_id)
    assert names(root) == {"two"} and names(root, among_deleted=True) == {"one"}
    code, output = here("report", "one")
    assert code == 2 and "rankzero delete --restore one" in output
    assert here("sync")[0] == 0
    store(root).deletion.restore(run_id)
    assert names(root) == {"one", "two"}


def test_delete_restore_and_prune(root: Path, here: Here) -> None:
    one, two = finished(root, "one"), finished(root, "two")
    run_id = mlflow_id(one)
    assert run_id is not None
    places = store(root).deletion.places(run_id)
    code, output = here("delete", "one")
    assert code == 2 and "--yes" in output and names(root) == {"one", "two"}, output
    code, output = here("delete", "one", "--yes")
    # Hard links of the checkpoint in MLflow's folder are counted once.
    assert code == 0 and "1 run, 1 MB with MLflow's files" in output, output
    assert names(root) == {"two"} and not store(root).deletion.is_active(run_id)
    assert here("delete", "--restore", "one")[0] == 0
    assert names(root) == {"one", "two"} and store(root).deletion.is_active(run_id)
    assert here("delete", "--restore", "two")[0] == 2
    here("delete", "one", "--yes")
    code, output = here("prune", "--deleted", "--dry-run")
    assert code == 0 and "one" in output and one.path.exists()
    code, output = here("prune", "--deleted", "--yes")
    assert code == 0 and "freed 1 MB" in output, output
    assert not one.path.exists() and places and not any(place.exists() for place in places)
    assert store(root).deletion.deleted() == set() and two.checkpoints.exists()
    assert names(root) == {"two"} and here("prune", "--deleted", "--yes")[0] == 0


def test_models_that_are_deleted_in_mlflow_go_with_their_run(root: Path) -> None:
    one, tracker, keeper = finished(root, "one"), store(root), Housekeeper()
    tracker.models.retire(tracker.models.list_checkpoints(tracker.find_run("one"))[0].model_id)
    append(one, started(2), saved(one, 7), ended())
    assert sync.deliver(one).complete
    (checkpoint,) = tracker.models.list_checkpoints(tracker.find_run("one"))
    tracker._client.delete_logged_model(checkpoint.model_id)
    keeper.delete(one)
    assert keeper.free(one) and not list(root.rglob("state.pt"))
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as database:
        assert database.execute("SELECT count(*) FROM logged_models").fetchone() == (0,)


def test_run_that_mlflow_gc_took_is_not_listed_and_its_disk_is_freed(
    root: Path, here: Here
) -> None:
    one = finished(root, "one")
    finished(root, "two")
    run_id = mlflow_id(one)
    assert run_id is not None
    store(root).deletion.delete(run_id)
    uri = uris.default_tracking_uri(root)
    gc = [sys.executable, "-m", "mlflow", "gc", "--backend-store-uri", uri, "--tracking-uri", uri]
    subprocess.run([*gc, "--run-ids", run_id], check=True, capture_output=True)
    assert names(root) == {"two"} and names(root, among_deleted=True) == {"one"}
    assert here("prune", "--deleted", "--yes")[0] == 0 and not one.path.exists()


def test_locked_store_does_not_count_as_one_without_deleted_runs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as database:
        database.execute("PRAGMA journal_mode=DELETE")  # as on a network file system
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UserError, match=r"locked .*mlflow\.db: try again"):
            deleted.read_store(root / "runs", seconds=0.01)
        monkeypatch.setattr(deleted, "read_store", partial(deleted.read_store, seconds=0.01))
        folder = make_folder(root)
        mark(folder)
        assert deleted.is_hidden(folder)


def test_store_that_one_may_only_read_says_which_runs_are_deleted(root: Path) -> None:
    store(root).deletion.delete(mlflow_id(finished(root, "one")) or "")
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as database:
            database.execute("VACUUM INTO ?", (f"{folder}/mlflow.db",))
        with contextlib.closing(sqlite3.connect(f"{folder}/mlflow.db")) as database:
            database.execute("PRAGMA journal_mode=WAL")
        Path(folder).chmod(0o555)
        try:
            if is_root:
                os.seteuid(65534)
            assert len(deleted.read_store(Path(folder, "runs")).deleted) == 1
        finally:
            if is_root:
                os.seteuid(0)
            Path(folder).chmod(0o755)


def test_run_stays_listed_if_the_database_was_lost_or_restored(
    root: Path, empty_database: Path
) -> None:
    finished(root, "one")
    shutil.copytree(root, root.parent / "before")
    finished(root, "two")
    # A backup without the newest run, whose artifacts are still there.
    for path in root.glob("mlflow.db*"):
        path.unlink()
    for path in (root.parent / "before").glob("mlflow.db*"):
        shutil.copy(path, root)
    assert names(root) == {"one", "two"}
    for path in root.glob("mlflow.db*"):
        path.unlink()
    shutil.rmtree(root / "artifacts")
    copied(empty_database, root)
    finished(root, "three")
    assert names(root) == {"one", "two", "three"}


def test_run_without_mlflow_is_deleted_by_a_mark(root: Path, here: Here) -> None:
    folder = finished(root, "one", deliver=False)
    code, output = here("delete", "one", "--yes")
    assert code == 2 and "MLflow lacks the whole run" in output and names(root) == {"one"}
    assert here("delete", "one", "--yes", "--discard-undelivered")[0] == 0 and not names(root)
    assert here("delete", "--restore", "one")[0] == 0 and names(root) == {"one"}
    here("delete", "one", "--yes", "--discard-undelivered")
    code, output = here("prune", "--deleted", "--yes")
    assert "kept: one: MLflow lacks" in output and folder.path.exists()
    assert "no deleted run" not in output
    assert here("prune", "--deleted", "--yes", "--discard-undelivered")[0] == 0
    assert not folder.path.exists()


def test_run_that_is_used_stays(root: Path, here: Here) -> None:
    folder = finished(root, "one")
    with run_locks.lock(folder, 0):
        code, output = here("delete", "one", "--yes")
        assert code == 2 and "it runs, or its delivery does" in output
        code, output = here("prune", "--keep-best", 0, "--yes")
        assert code == 0 and "kept: one: it runs" in output and names(root) == {"one"}
    running = make_folder(root, uris.default_tracking_uri(root), name="running")
    run_locks.claim(running, 0)
    append(running, started())
    assert "it runs" in here("delete", "running", "--yes", "--discard-undelivered")[1]
    # Whoever deletes it in MLflow still sees that it runs.
    running.deleted.touch()
    assert "running" in names(root)


def test_run_that_is_launched_stays(root: Path, here: Here) -> None:
    folder = finished(root, "one")
    # As `rankzero resume` has it until its ranks have started.
    with sole_launcher(folder, machines=2):
        assert "it runs" in here("delete", "one", "--yes")[1] and names(root) == {"one"}
    with run_locks.lock(folder, 1):
        folder.system(1).touch()
        assert "it runs" in here("delete", "one", "--yes")[1] and names(root) == {"one"}
    folder.system(1).write_text("{}\n")
    assert "lacks samples of node 1" in here("delete", "one", "--yes")[1]


def test_part_of_a_helping_machine_is_deleted_once_it_is_delivered(root: Path, here: Here) -> None:
    folder = make_folder(root, uris.default_tracking_uri(root), name="one")
    folder.system(1).write_text("{}\n")
    output = here("delete", "one", "--yes")[1]
    assert "MLflow lacks samples of node 1: " in output, output
    folder.system(1).write_text("")
    assert here("delete", "one", "--yes")[0] == here("prune", "--deleted", "--yes")[0] == 0
    assert not folder.path.exists()


def test_run_that_somebody_wants_back_while_prune_asks_stays(root: Path) -> None:
    one, two = finished(root, "one", deliver=False), finished(root, "two")
    keeper, record = Housekeeper(discard_undelivered=True), store(root).find_run("two")
    keeper.delete(one)
    keeper.delete(two)
    keeper.restore(one)
    (checkpoint,) = store(root).models.list_checkpoints(record)
    store(root).models.register(record, checkpoint.model_id, "digits")
    assert not keeper.free(one) and one.checkpoints.exists()
    with pytest.raises(UserError, match="digits/1"):
        keeper.free(two)
    assert two.checkpoints.exists()


def test_run_that_is_erased_now_is_not_restored(root: Path) -> None:
    folder, keeper = finished(root, "one"), Housekeeper()
    keeper.delete(folder)
    with alone(folder), pytest.raises(UserError, match="erases or delivers one: try again"):
        keeper.restore(folder)
    keeper.restore(folder)
    assert names(root) == {"one"}


def test_run_that_is_resumed_while_delete_asks_stays(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, three = (finished(root, name) for name in ("one", "two", "three"))
    keeper = Housekeeper()
    assert not any(map(keeper.obstacle, (one, two, three)))
    append(three, started(2, step=5), steps(6, 9), ended())  # not delivered
    with sole_launcher(one, machines=1):
        assert delete_command.delete(keeper, [one, two, three], yes=True) == FAILED
    assert names(root) == {"one", "three"} and names(root, among_deleted=True) == {"two"}
    output = capsys.readouterr().out
    assert "kept: one: another process uses it" in output and "deleted 1 run;" in output
    assert "kept: three: MLflow lacks" in output


def test_error_at_one_run_deletes_and_restores_the_others(
    root: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        finished(root, name)

    def but_two(method: Callable[..., None]) -> Callable[..., None]:
        def call(keeper: Housekeeper, folder: RunFolder) -> None:
            if folder.path.name == "two":
                raise ConnectionError("the server has gone")
            method(keeper, folder)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(Housekeeper, "delete", but_two(Housekeeper.delete))
        code, output = here("delete", "one", "two", "three", "--yes")
    assert code == FAILED and names(root) == {"two"}, output
    assert "kept: two: ConnectionError: the server has gone" in output
    assert "deleted 2 runs; bring back: " in output
    assert here("delete", "two", "--yes")[0] == 0
    monkeypatch.setattr(Housekeeper, "restore", but_two(Housekeeper.restore))
    code, output = here("delete", "--restore", "two", "one", "three")
    assert code == FAILED and names(root) == {"one", "three"}, output
    assert "still deleted: two: ConnectionError: the server has gone" in output


def test_copy_of_a_store_does_not_delete_in_the_original(root: Path, here: Here) -> None:
    one = finished(root, "one")
    copy = root.parent / "copy"
    shutil.copytree(root, copy)
    shutil.rmtree(copy / "artifacts")
    assert main(["delete", "one", "--yes", "--dir", str(copy)]) == 2
    assert names(root) == names(copy) == {"one"}
    # The run's folder alone, in another store.
    shutil.rmtree(copy)
    shutil.copytree(one.path, copy / "runs" / "one")
    assert main(["delete", "one", "--yes", "--dir", str(copy)]) == 2
    assert names(root) == {"one"}
    root.rename(root.parent / "moved")
    assert main(["delete", "one", "--yes", "--dir", str(root.parent / "moved")]) == 2


def test_run_that_ended_in_a_living_process_is_restored(root: Path, here: Here) -> None:
    folder = finished(root, "one", deliver=False)
    run_locks.claim(folder, 0)
    append(folder, started(2), ended())
    assert here("delete", "one", "--yes", "--discard-undelivered")[0] == 0
    assert here("report", "one")[0] == 2 and not names(root)
    assert here("delete", "--restore", "one")[0] == 0 and names(root) == {"one"}


def test_name_that_two_runs_have_deletes_neither(root: Path, here: Here) -> None:
    run_id = mlflow_id(finished(root, "one")) or ""
    two = mlflow_id(finished(root, "two"))
    store(root).set_tags(run_id, {"mlflow.runName": "two"})
    code, output = here("delete", "two", "--yes")
    assert code == 2 and "give the MLflow run id" in output and names(root) == {"one", "two"}
    assert here("delete", two, "--yes")[0] == 0 and names(root) == {"one"}


def test_run_that_was_renamed_in_mlflow_is_shown_by_that_name(root: Path, here: Here) -> None:
    study, same = finished(root, "study"), "the [good] one"
    study.add_child(finished(root, "trial", parent="study").path.name)
    for folder in (study, finished(root, "other")):
        store(root).set_tags(mlflow_id(folder) or "", {"mlflow.runName": same})
    for word in (f"parent={same.replace('[', '?')}", "parent=study"):
        code, output = here("runs", "--all", word)
        assert code == 0 and output.splitlines()[1].split()[0] == "trial", output
        assert output.splitlines()[1].endswith(same)
    assert "study" not in here("runs", "run=the*")[1] and same in here("runs", "run=study")[1]
    assert "no run matches" in here("runs", "run=the*", "run!=study", "run!=other")[1]
    code, output = here("report", "study", "trial")
    assert code == 0 and output.split("\n")[0].split() == [*same.split(), "trial"], output
    code, output = here("report", "study", "other", "--all")
    assert f"{same} (study)" in " ".join(output.split()), output
    assert here("doctor", "study")[1].startswith(f"{same}: FINISHED\n")
    code, output = here("delete", "study", "--yes")
    assert code == 0 and f"{same} and 1 more" in output, output
    assert f"rankzero delete --restore '{same}'" in output, output
    code, output = here("delete", "--restore", same)
    assert code == 0 and output.startswith(f"{same} is back, with all"), output


def test_registered_model_keeps_its_run(root: Path, here: Here) -> None:
    folder = finished(root, "one")
    tracker = store(root)
    record = tracker.find_run("one")
    (checkpoint,) = tracker.models.list_checkpoints(record)
    assert tracker.models.register(record, checkpoint.model_id, "digits") == 1
    code, output = here("delete", "one", "--yes")
    assert code == 2 and "registered as digits/1" in output and names(root) == {"one"}
    tracker.deletion.delete(record.run_id)
    code, output = here("prune", "--deleted", "--yes")
    assert code == 0 and "kept: one: its files are registered" in output
    assert folder.path.exists() and all(map(Path.exists, tracker.deletion.places(record.run_id)))


def test_children_go_with_their_run(root: Path, here: Here) -> None:
    study = finished(root, "study")
    trial = finished(root, "study-t00", deliver=False, parent="study")
    study.add_child("study-t00")
    sync.deliver(study)
    assert "belongs to study" in here("delete", "study-t00", "--yes")[1]
    code, output = here("delete", "study", "--yes")
    assert code == 0 and "study and 1 more" in output and "2 MB" in output and not names(root)
    assert len(store(root).deletion.deleted()) == 2
    here("delete", "--restore", "study")
    assert names(root) == {"study", "study-t00"} and not store(root).deletion.deleted()
    # Deleted in MLflow, which deletes one run at a time.
    run_id = mlflow_id(study)
    assert run_id is not None
    store(root).deletion.delete(run_id)
    assert not names(root)
    assert here("prune", "--deleted", "--yes")[0] == 0
    assert not study.path.exists() and not trial.path.exists()


def test_registry_is_read_once_for_a_study(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, calls, versions = finished(root, "study"), [], MlflowModels.versions
    finished(root, "study-t00", deliver=False, parent="study")
    study.add_child("study-t00")
    assert sync.deliver(study).complete

    def count(models: MlflowModels, ids: set[str]) -> list[ModelVersion]:
        calls.append(ids)
        return versions(models, ids)

    monkeypatch.setattr(MlflowModels, "versions", count)
    # Two runs with a checkpoint each.
    assert Housekeeper().obstacle(study) is None and [len(ids) for ids in calls] == [4]


def test_child_that_was_deleted_alone_in_mlflow_is_restored(root: Path, here: Here) -> None:
    study = finished(root, "study")
    for name in ("study-t00", "study-t01"):
        finished(root, name, deliver=False, parent="study")
        study.add_child(name)
    sync.deliver(study)
    run_id = mlflow_id(RunFolder(root / "runs" / "study-t00"))
    assert run_id is not None
    store(root).deletion.delete(run_id)
    code, output = here("delete", "--restore", "study-t00")
    assert code == 0 and names(root) == {"study", "study-t00", "study-t01"}, output
    here("delete", "study", "--yes")
    assert "belongs to study" in here("delete", "--restore", "study-t01")[1]
    study_id = mlflow_id(study)
    assert study_id is not None
    store(root).deletion.restore(study_id)
    # Its runs look like runs that were deleted alone. They are no rubbish.
    assert here("prune", "--deleted", "--yes")[0] == 0
    assert RunFolder(root / "runs" / "study-t00").path.exists()
    for name in ("study-t00", "study-t01"):
        assert here("delete", "--restore", name)[0] == 0
    assert names(root) == {"study", "study-t00", "study-t01"}
    assert here("prune", "--keep-best", 0, "--dry-run")[0] == 0
    store(root).deletion.delete(run_id)
    here("delete", "study", "--yes")
    assert "also those deleted alone" in here("delete", "--restore", "study")[1]
    assert names(root) == {"study", "study-t00", "study-t01"}


def test_child_whose_run_was_removed_by_hand_can_go(root: Path, here: Here) -> None:
    study = finished(root, "study")
    study.add_child(finished(root, "child", deliver=False, parent="study").path.name)
    sync.deliver(study)
    assert "belongs to study" in here("delete", "child", "--yes")[1]
    shutil.rmtree(study.path)
    assert here("delete", "child", "--yes")[0] == here("prune", "--deleted", "--yes")[0] == 0
    assert not (root / "runs" / "child").exists()


def test_run_that_is_named_twice_is_one(root: Path, here: Here) -> None:
    run_id = mlflow_id(finished(root, "one"))
    assert "deleted 1 run;" in here("delete", "one", run_id, "--yes")[1]


def test_run_that_another_command_removed_is_not_shown(root: Path) -> None:
    shutil.rmtree((gone := make_folder(root)).path)
    delete_command.show(Housekeeper(), [gone])


def test_users_who_may_write_to_the_runs_share_the_leftovers(tmp_path: Path) -> None:
    (left := tmp_path / ".leftovers").mkdir(0o700)  # as of an earlier version
    tmp_path.chmod(0o2777)
    removal.workplace(tmp_path, "copy")
    assert left.stat().st_mode & 0o7777 == 0o2777
    left.rmdir()
    with mock.patch.object(Path, "chmod", side_effect=PermissionError):
        assert not removal.workplace(tmp_path, "copy").exists()


def test_child_that_never_began_goes_with_its_run(root: Path, here: Here) -> None:
    study = finished(root, "study")
    runs = root / "runs"
    for name in ("study-seed0", "study-seed1", "other"):
        study.add_child(name)
        (runs / name).mkdir()
        (runs / name / "config.yaml").write_text("password: hunter2\n")
    (runs / "study-seed1" / "events.jsonl").touch()  # without its identity, it is nobody's
    assert here("delete", "study", "--yes")[0] == here("prune", "--deleted", "--yes")[0] == 0
    left = {path.name for path in runs.iterdir() if not path.name.startswith(".")}
    assert left == {"study-seed1", "other"}


def test_study_with_more_children_than_open_files_is_deleted(root: Path) -> None:
    study = make_folder(root, name="study")
    for number in range(40):
        child = make_folder(root, name=f"study-t{number}", parent="study")
        append(child, ended())
        study.add_child(child.path.name)
    append(study, ended())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        with alone(study) as unused:
            assert unused
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_prune_does_not_blame_mlflow_for_an_error_of_the_disk(root: Path, here: Here) -> None:
    folder = finished(root, "one")
    (folder.path / "launcher.lock").mkdir()
    output = here("prune", "--keep-best", 0, "--yes")[1]
    assert "kept: one: IsADirectoryError" in output and "MLflow" not in output, output


def test_files_go_after_the_locks_that_a_network_file_system_would_keep(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = finished(root, "one"), list[str]()

    def look(leftovers: Sequence[Path]) -> None:
        links = list(Path("/proc/self/fd").iterdir())
        opened.extend(str(link.readlink()) for link in links if link.is_symlink())
        erase(leftovers)

    erase, keeper = removal.erase, Housekeeper()
    monkeypatch.setattr(removal, "erase", look)
    keeper.delete(folder)
    assert keeper.free(folder) and opened and not any("removed-" in path for path in opened)
    assert not list((root / "runs" / ".leftovers").iterdir())


def test_leftover_that_cannot_go_is_not_freed(root: Path) -> None:
    (root / "runs" / ".leftovers").mkdir(parents=True)
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "file").write_text("text")
    # As of a trial's folder that was moved to another disk.
    left = root / "runs" / ".leftovers" / "removed-1"
    left.symlink_to(root / "elsewhere")
    other = left.with_name("removed-2")
    other.mkdir()
    with pytest.raises(UserError, match=f"cannot remove all of {left}"):
        removal.erase([left, other])
    assert not other.exists()
    assert removal.tidy(root / "runs") == 0 and (root / "elsewhere" / "file").exists()


def test_copy_that_takes_days_keeps_its_files(root: Path) -> None:
    for kind, days in (("copy", 3), ("import", 8)):
        place = removal.workplace(root / "runs", kind)
        place.mkdir()
        os.utime(place, (time.time() - 86400 * days,) * 2)
    removal.tidy(root / "runs")
    (left,) = (root / "runs" / ".leftovers").iterdir()
    assert left.name.startswith("copy-")


def test_study_that_is_searched_stays(root: Path) -> None:
    study = finished(root, "study")
    finished(root, "study-t00", deliver=False, parent="study")
    study.add_child("study-t00")
    sync.deliver(study)
    keeper, storage = Housekeeper(), default_storage(root)
    keeper.delete(study)
    # Its leader is dead, and a helper is alive, whose runs are elsewhere.
    shared = open_study(storage, "study", sampler="random", pruner="none", seed=0)
    with pytest.raises(UserError, match="still search"):
        keeper.free(study)
    assert study.checkpoints.exists() and study.children[0].checkpoints.exists()
    shared.members.close()
    keeper.free(study)
    assert not study.path.exists()


def test_study_with_a_trial_on_another_disk_stays(root: Path) -> None:
    study = make_folder(root, name="study")
    trial = make_folder(root, name="study-t00", parent="study")
    study.add_child("study-t00")
    trial.path.rename(root / "elsewhere")
    trial.path.symlink_to(root / "elsewhere")
    assert "study-t00 is a link" in str(Housekeeper(discard_undelivered=True).obstacle(study))


def test_run_that_is_not_a_child_stays(root: Path, here: Here) -> None:
    study, other = finished(root, "study"), finished(root, "other")
    study.add_child("other")
    shutil.copytree(other.path, root / "runs" / "copy")
    assert "a copy of other" in here("delete", "copy", "--yes")[1]
    assert here("delete", "study", "--yes")[0] == here("prune", "--deleted", "--yes")[0] == 0
    assert not study.path.exists() and names(root) == {"other"} and other.events.exists()


def test_prune_keeps_the_best_and_the_young(root: Path, here: Here) -> None:
    for number in range(4):
        folder = make_folder(root, uris.default_tracking_uri(root), name=f"run-{number}")
        at = time.time() - 86400 * number
        start = dataclasses.replace(started(), time=at)
        append(folder, start, ended(metrics={"best": number / 10}, at=at))
        sync.deliver(folder)
    assert here("prune")[0] == 2 and here("prune", "--older-than", "old")[0] == 2
    code, output = here("prune", "--keep-best", 1, "--older-than", "36h", "--dry-run")
    assert code == 0 and "run-2" in output and "run-1" not in output and len(names(root)) == 4
    assert here("prune", "--keep-best", 1, "--experiment", "others", "--yes")[0] == 0
    assert len(names(root)) == 4
    assert here("prune", "--keep-best", 1, "--older-than", "36h", "--yes")[0] == 0
    assert names(root) == {"run-0", "run-1", "run-3"}


def test_prune_takes_a_run_that_was_resumed_for_young(root: Path, here: Here) -> None:
    folder = make_folder(root, name="resumed")
    for attempt, days in ((1, 5), (2, 1), (3, 0)):
        at = time.time() - 86400 * days
        append(folder, dataclasses.replace(started(attempt), time=at), ended(at=at))
    prune = ("prune", "--yes", "--discard-undelivered", "--older-than")
    assert here(*prune, "12h")[0] == 0 and names(root) == {"resumed"}
    assert here(*prune, "0s")[0] == 0 and names(root) == set()


def test_runs_without_a_value_to_compare_are_not_the_worst(root: Path, here: Here) -> None:
    finished(root, "no-goal")
    for name, mode, value in (("low", "min", 0.1), ("high", "max", 0.9), ("none", "max", None)):
        folder = make_folder(root, name=name)
        start = started(**{"goal.mode": mode, "goal.metric": "loss"})
        append(folder, start, ended(metrics={} if value is None else {"best": value}))
    here("prune", "--keep-best", 1, "--yes", "--discard-undelivered")
    assert names(root) == {"no-goal", "low", "high"}


def test_prune_keeps_the_best_run_after_a_resume_that_failed(root: Path, here: Here) -> None:
    for name, value in (("best", 0.9), ("worse", 0.8)):
        folder = make_folder(root, name=name)
        start = started(**{"goal.mode": "max", "goal.metric": "val/accuracy"})
        append(folder, start, evaluated(10, value), ended(metrics={"best": value}))
    failed = dataclasses.replace(started(2), total_steps=None)  # in its set-up
    append(RunFolder(root / "runs" / "best"), failed, ended("FAILED"))
    here("prune", "--keep-best", 1, "--yes", "--discard-undelivered")
    assert names(root) == {"best"}


@pytest.mark.parametrize("at", ["erase", "remove", "rmtree"])
def test_kill_while_a_run_is_freed_leaves_nothing_for_ever(
    root: Path, here: Here, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    folder = finished(root, "one")
    keeper = Housekeeper()
    keeper.delete(folder)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        if at == "erase":
            patched.setattr("rankzero.mlflow_store.client.mlflow_compat.erase", die)
        else:
            patched.setattr(removal.shutil if at == "rmtree" else removal, at, die)
        keeper.free(folder)
    assert not names(root)
    assert here("prune", "--deleted", "--yes")[0] == 0
    assert lookup.folders(root / "runs") == [] and store(root).deletion.deleted() == set()
    assert not list((root / "runs").rglob("state.pt")) and not list(root.rglob("state.pt"))


def test_a_dead_server_hides_no_deletion_of_another_store(
    root: Path, here: Here, server: Server
) -> None:
    there = make_folder(root, server.uri, name="there")
    append(there, started(), ended())
    assert sync.deliver(there).complete
    for name in ("a", "b"):
        folder = make_folder(root, "http://127.0.0.1:9", name=name, mlflow_run_id="1" * 32)
        append(folder, started(), ended())
    mark(folder)
    never = make_folder(root, "http://127.0.0.1:9", name="never")  # its server has nothing of it
    append(never, started(), ended())
    mark(never)
    MlflowRuns(server.uri).deletion.delete(mlflow_id(there) or "")
    code, output = here("prune", "--deleted", "--yes", "--discard-undelivered")
    assert code == 0 and "freed" in output and names(root) == {"a"}, output
    assert not there.path.exists() and not never.path.exists()
    assert folder.path.exists(), "nothing is erased without an answer"
    assert output.count("127.0.0.1:9 does not answer") == 1 and "kept" not in output, output


def test_prune_keeps_the_best_of_the_runs_that_their_server_still_has(
    root: Path, here: Here, server: Server
) -> None:
    for name, value in (("leaked", 1.0), ("good", 0.9), ("bad", 0.1)):
        folder = make_folder(root, server.uri, name=name)
        start = started(**{"goal.mode": "max", "goal.metric": "val/accuracy"})
        append(folder, start, ended(metrics={"best": value}))
        assert sync.deliver(folder).complete
    leaked = RunFolder(root / "runs" / "leaked")
    MlflowRuns(server.uri).deletion.delete(mlflow_id(leaked) or "")
    # A server that is off is asked once for all of its runs.
    for name in ("a", "b"):
        off = make_folder(root, "http://127.0.0.1:9", name=name, mlflow_run_id="1" * 32)
        append(off, started(), ended())
    code, output = here("prune", "--keep-best", 1, "--yes", "--discard-undelivered")
    assert code == 0 and names(root) == {"good", "a", "b"}, output
    assert names(root, among_deleted=True) == {"leaked", "bad"}
    assert output.count("127.0.0.1:9 does not answer") == 1 and "kept" not in output, output


def study_on(server: Server, root: Path) -> tuple[RunFolder, list[str]]:
    """A study with a trial, delivered, and their ids there."""
    study = make_folder(root, server.uri, name="study")
    trial = make_folder(root, server.uri, name="study-t00", parent="study")
    study.add_child("study-t00")
    for folder in (trial, study):
        append(folder, started(), ended())
    assert sync.deliver(study).complete
    return study, [mlflow_id(folder) or "" for folder in (study, trial)]


def test_study_on_a_server_is_deleted_as_a_whole(
    root: Path, here: Here, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, ids = study_on(server, root)
    deletion, delete = MlflowRuns(server.uri).deletion, MlflowDeletion.delete
    calls = list[str]()

    def fails_once(store: MlflowDeletion, run_id: str) -> None:
        calls.append(run_id)
        if len(calls) == 2:
            raise ConnectionError("the server has gone")
        delete(store, run_id)

    monkeypatch.setattr(MlflowDeletion, "delete", fails_once)
    code, output = here("delete", "study", "--yes")
    assert code == FAILED and "kept: study: " in output and "study" in names(root), output
    assert here("delete", "--restore", "study")[0] == 0 and not {*ids} & deletion.deleted()
    assert here("delete", "study", "--yes")[0] == 0 and set(ids) <= deletion.deleted()
    deletion.restore(ids[1])  # as if somebody had deleted the study alone, in MLflow's UI
    assert here("prune", "--deleted", "--yes")[0] == 0 and not study.path.exists()
    assert set(ids) <= deletion.deleted()


def test_study_that_was_deleted_on_its_server_is_restored_with_its_trials(
    root: Path, here: Here, server: Server
) -> None:
    study, ids = study_on(server, root)
    study.add_child("study-t01")  # no launch has begun it
    deletion = MlflowRuns(server.uri).deletion
    deletion.delete(ids[0])  # no command here has seen it yet
    assert here("delete", "--restore", "study")[0] == 0 and ids[0] not in deletion.deleted()
    for run_id in ids:
        deletion.delete(run_id)
    assert here("prune", "--deleted")[0] == 2 and not names(root)
    assert here("delete", "--restore", "study")[0] == 0 and names(root) == {"study", "study-t00"}


def test_list_rounds_a_param_and_json_does_not(root: Path, here: Here) -> None:
    append(make_folder(root, name="one"), started(lr="0.004242640687119286"), ended())
    assert "0.004243" in here("runs", "lr>0")[1] and "0.0042426" not in here("runs", "lr>0")[1]
    assert "0.004242640687119286" in here("runs", "--json")[1]


def test_sizes_are_in_lists(root: Path, here: Here) -> None:
    finished(root, "one", deliver=False)
    assert "1 MB" in here("runs")[1] and "no run matches" in here("runs", "size>2e6")[1]
    (listed,) = json.loads(here("runs", "--json")[1])
    assert 1_000_000 < listed["bytes"] < 1_100_000


def test_name_that_a_server_has_is_known_to_every_verb(
    root: Path, here: Here, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(root, server.uri, name="here")
    append(folder, started(), ended())
    assert sync.deliver(folder).complete
    MlflowRuns(server.uri).set_tags(mlflow_id(folder) or "", {"mlflow.runName": "Ada's best"})
    for verb in ("report", "doctor", "logs", "sync"):
        code, output = here(verb, "Ada's best")
        assert code == 0, output
    folder.config.write_text("lr: 0.1\n")
    assert "here does not record an experiment file" in here("resume", "Ada's best")[1]
    assert "Ada's best has no model in MLflow" in here("register", "Ada's best", "model")[1]
    old = finished(root, "old").path
    shutil.rmtree(old)  # the embedded store still has it
    assert f"looking in {uris.default_tracking_uri(root)}" in here("resume", "old")[1]
    assert not old.exists()
    code, output = here("delete", "Ada's best", "--yes")
    assert code == 0 and names(root) == set(), output
    assert here("delete", "--restore", "Ada's best")[0] == 0 and names(root) == {"here"}
    code, output = here("report", "nobody")
    assert code == 2 and "no run is called 'nobody'; the newest are here" in output, output
    other = make_folder(root.parent / "other", server.uri, name="elsewhere")
    append(other, started(), ended())
    assert sync.deliver(other).complete
    assert "a run of that name, which is not on this disk" in here("report", "elsewhere")[1]
    # A port that nobody listens on.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    code, output = here("report", "Ada's best")
    assert (
        code == 2
        and "no run is called" in output
        and "127.0.0.1:9 did not give the names" in output
    )
    assert here("report", "here")[0] == 0


def test_runs_on_a_server(root: Path, here: Here, server: Server) -> None:
    folders = []
    for name in ("one", "two"):
        folders.append(make_folder(root, server.uri, name=name))
        append(folders[-1], started(), ended())
        assert sync.deliver(folders[-1]).complete
    one, two = folders
    tracker, ids = MlflowRuns(server.uri), [mlflow_id(folder) or "" for folder in folders]
    assert here("delete", "one", "--yes")[0] == 0
    assert names(root) == {"two"} and not tracker.deletion.is_active(ids[0])
    # Another one is deleted on the server, where this machine's lists do not look.
    tracker.deletion.delete(ids[1])
    assert "2 runs" in here("prune", "--deleted", "--dry-run")[1]
    assert names(root) == {"two"} and not two.deleted.exists(), "a dry run writes nothing"
    # MLflow's own Restore: only this command asks a server. Nothing is erased without an answer.
    tracker.deletion.restore(ids[0])
    code, output = here("prune", "--deleted")
    assert code == 2 and names(root) == {"one"} and two.deleted.exists(), output
    assert here("delete", "one", "--yes")[0] == 0
    tracker.deletion.restore(ids[0])
    code, output = here("prune", "--deleted", "--yes")
    assert code == 0 and "kept: one: it was restored" in output, output
    assert one.path.exists() and not two.path.exists() and names(root) == {"one"}
    # The server's own copies are its administrator's.
    assert ids[1] in tracker.deletion.deleted()


def test_run_that_another_machine_has_continued_stays(
    root: Path, here: Here, server: Server
) -> None:
    folder = make_folder(root, server.uri, name="one")
    append(folder, started(), ended())
    assert sync.deliver(folder).complete
    tracker, run_id = MlflowRuns(server.uri), mlflow_id(folder) or ""
    tracker.set_tags(run_id, {"rankzero.claim": f"{2 * time.time()!r} b"})
    for command in (("delete", "one"), ("prune", "--keep-best", "0")):
        assert "b has continued the run" in here(*command, "--yes")[1]
    assert tracker.deletion.is_active(run_id)
    append(folder, ended("FAILED"))
    code, output = here("sync")
    assert code == 0 and output.startswith("one: b has continued the run"), output
    assert tracker.find_run(run_id).status == "FINISHED"
    # Somebody deletes it in MLflow, and this disk is free to go.
    tracker.deletion.delete(run_id)
    code, output = here("prune", "--deleted", "--yes", "--discard-undelivered")
    assert code == 0 and not folder.path.exists(), output


def test_run_whose_experiment_was_deleted_during_its_delivery_gets_the_rest_once_restored(
    root: Path, here: Here, server: Server
) -> None:
    folder = make_folder(root, server.uri, name="one")
    append(folder, started(), steps(1, 3))
    assert sync.deliver(folder).run_id
    tracker, run_id = MlflowRuns(server.uri), mlflow_id(folder) or ""
    experiment = tracker._run(run_id).info.experiment_id
    tracker._client.delete_experiment(experiment)
    append(folder, steps(4, 6), ended())
    code, output = here("sync", "one")
    assert code == FAILED and output.count("\n") == 1 and "delete --restore one" in output, output
    assert here("sync")[0] == 0, "a scheduled sync fails for ever"
    assert "one" in here("runs")[1] and "MLflow lacks" in here("delete", "one", "--yes")[1]
    code, output = here("delete", "--restore", "one")
    assert code == 2 and f"mlflow experiments restore -x {experiment}" in output, output
    assert "all of its runs" in output and not tracker.deletion.is_active(run_id)
    tracker._client.restore_experiment(experiment)
    assert "is not deleted" in here("delete", "--restore", "one")[1]
    code, output = here("sync", "one")
    assert code == 0 and "complete" in output and "deleted" not in output, output
    assert [point.step for point in tracker.history(run_id, "train/loss")] == [1, 2, 3, 4, 5, 6]

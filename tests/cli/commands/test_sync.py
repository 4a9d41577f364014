"""`rankzero sync`: of several runs, one of which goes away; and whose best model it logs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rankzero.cli.commands import sync as command
from rankzero.errors import FAILED
from rankzero.events import SystemSampled, encode
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store import delivery_state, run_locks
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync
from rankzero.tracking.deliverer import Deliverer
from rankzero.training.checkpoints import best_model
from support.runs import T0, append, ended, make_folder, started, steps
from support.stores import list_runs


def test_folder_that_disappears_does_not_stop_other_deliveries(
    sqlite: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = [make_folder(tmp_path, sqlite) for _ in range(3)]
    for folder in made:
        append(folder, started(), steps(1, 3), ended("KILLED", "stopped"))
    going = made[1]

    class Moving(Deliverer):
        """Delivers; one run's folder is moved away at the first commit."""

        def commit(self) -> None:
            if self._folder.path == going.path and not (tmp_path / "moved").exists():
                going.path.rename(tmp_path / "moved")
                RunFolder.create(going.path.parent, RunFolder(tmp_path / "moved").identity)
            super().commit()

    monkeypatch.setattr(sync, "Deliverer", Moving)
    assert command.run(argparse.Namespace(run=None, dir=tmp_path)) == FAILED
    told = capsys.readouterr().out
    assert f"{going.path.name}: {going.path} was moved or deleted while it was delivered" in told
    assert told.count(": complete, ") == 2
    status = {run.name: run.status for run in list_runs(sqlite)}
    assert {status[folder.path.name] for folder in (made[0], made[2])} == {"KILLED"}


def test_offline_run_that_trains_is_not_complete(
    sqlite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(folder := make_folder(tmp_path, sqlite, name="one"), started(), steps(1, 3))
    run_locks.claim(folder, 0)
    assert command.run(argparse.Namespace(run="one", dir=tmp_path)) == 0
    assert capsys.readouterr().out.startswith("one: still trains, ")


def test_a_run_that_trains_holds_up_no_other_delivery(
    sqlite: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    over, trains = (make_folder(tmp_path, sqlite) for _ in range(2))
    append(over, started(), steps(1, 3), ended())
    run_locks.claim(trains, 0)
    append(trains, started(step=1), steps(1, 3))
    monkeypatch.setattr(command, "GRACE_SECONDS", 0.2)
    with run_locks.lock(trains, 0):  # its courier
        assert command.run(argparse.Namespace(run=None, dir=tmp_path)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{trains.path.name}: still trains, and another process delivers it"
    assert printed[1].startswith(f"{over.path.name}: complete")


def test_a_folder_that_cannot_be_locked_does_not_stop_other_deliveries(
    sqlite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [make_folder(tmp_path, sqlite) for _ in range(3)]
    for folder in made:
        append(folder, started(), steps(1, 3), ended())
    lock_out(made[1])
    assert command.run(argparse.Namespace(run=None, dir=tmp_path)) == FAILED
    printed = capsys.readouterr().out
    assert f"{made[1].path.name}: [Errno " in printed and printed.count(": complete, ") == 2


def test_a_child_that_cannot_be_locked_does_not_stop_its_siblings(
    sqlite: str, tmp_path: Path
) -> None:
    parent = make_folder(tmp_path, sqlite)
    children = [make_folder(tmp_path, sqlite, parent=parent.path.name) for _ in range(2)]
    for folder in (parent, *children):
        append(folder, started(), steps(1, 3), ended())
    for child in children:
        parent.add_child(child.path.name)
    lock_out(children[0])
    with pytest.raises(OSError, match=children[0].path.name):
        sync.deliver(parent)
    assert {run.name for run in list_runs(sqlite)} == {parent.path.name, children[1].path.name}


def test_children_are_delivered_with_their_parent_and_wait_for_nothing(
    sqlite: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parent = make_folder(tmp_path, sqlite)
    child = make_folder(tmp_path, sqlite, parent=parent.path.name)
    parent.add_child(child.path.name)
    append(parent, started(), ended())
    append(child, started(step=9), steps(10, 20), ended())  # the newest, so the first of a list
    monkeypatch.setattr(command, "GRACE_SECONDS", 0.5)
    assert command.run(argparse.Namespace(run=None, dir=tmp_path)) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{parent.path.name}: complete, ") and printed.count("\n") == 1
    assert {run.name for run in list_runs(sqlite)} == {parent.path.name, child.path.name}


def lock_out(folder: RunFolder) -> None:
    """Make a lock that nobody can open, as the file of another user: a folder."""
    (folder.path / "recorder.lock").mkdir()


def test_samples_of_other_nodes_are_delivered_here_and_on_a_helper_machine(
    sqlite: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_folder(tmp_path, sqlite)
    append(folder, started(), steps(1, 3), ended())
    helper = RunFolder.create(tmp_path / "helper" / "runs", folder.identity)
    everything = argparse.Namespace(run=None, dir=tmp_path)
    one = argparse.Namespace(run=folder.path.name, dir=tmp_path / "helper")
    sample = encode(SystemSampled(T0, 1, {"system/node_1/cpu": 1.0})) + "\n"
    helper.system(1).write_text(sample)
    with monkeypatch.context() as patched:
        patched.setattr(command, "GRACE_SECONDS", 0.2)
        assert command.run(one) == FAILED and "samples of node 1" in capsys.readouterr().out
    assert command.run(everything) == command.run(one) == 0
    assert ": complete" in capsys.readouterr().out and not delivery_state.late_nodes(helper)

    folder.system(2).write_text(sample.replace("node_1", "node_2"))
    assert command.run(everything) == 0 and folder.path.name in capsys.readouterr().out
    assert not delivery_state.late_nodes(folder)
    assert command.run(everything) == 0 and "nothing to deliver" in capsys.readouterr().out


def test_samples_of_a_deleted_run_do_not_fail_a_sync_of_all(
    sqlite: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parent = make_folder(tmp_path, sqlite)
    kept, gone = (
        RunFolder.create(
            parent.path.parent,
            dataclasses.replace(parent.identity, name=name, uuid=name, parent=parent.path.name),
        )
        for name in ("kept", "gone")
    )
    for folder in (parent, kept, gone):
        append(folder, started(), steps(1, 3), ended())
    for child in (kept, gone):
        parent.add_child(child.path.name)
        child.late_model.touch()
    monkeypatch.setattr(command, "_lacks_model", lambda folder: folder.late_model.exists())
    logged: list[RunFolder] = []

    def log_best(folder: RunFolder, _: object) -> None:
        logged.append(folder)
        folder.late_model.unlink()

    sample = encode(SystemSampled(T0, 1, {"system/node_1/cpu": 1.0})) + "\n"
    gone.system(1).write_text(sample)
    assert sync.deliver(parent).done
    run_id = delivery_state.load(delivery_state.path_of(gone, 0)).run_id or ""
    MlflowRuns(sqlite)._client.delete_run(run_id)
    later = encode(SystemSampled(T0 + 9, 2, {"system/node_1/cpu": 1.0})) + "\n"
    gone.system(1).write_text(sample + later)
    monkeypatch.setattr(best_model, "log_best", log_best)
    assert command.deliver(parent, set(), is_named=False, seconds=0.3) == 0 and logged == [kept]
    assert "was deleted" in capsys.readouterr().out
    assert command.deliver(parent, set(), is_named=True, seconds=0.3) == FAILED


LOGS, LOGS_NONE = "train: {mlflow: {log_model: true}}", "train: {mlflow: {log_model: false}}"


@pytest.mark.parametrize(
    ("experiment_file", "settings", "logged_after", "late", "is_logged"),
    [
        (None, None, None, False, False),  # of rankzero.track
        ("/none.py", LOGS_NONE, None, False, False),
        ("/none.py", LOGS, None, False, True),
        ("/none.py", "train: {checkpoints: {save_every: 0}}", None, False, False),
        ("/none.py", "train: {}", None, False, True),  # of a version without the setting
        ("/none.py", LOGS, 0.0, False, False),
        ("/none.py", LOGS, -1.0, False, True),  # by an attempt before the last
        ("/none.py", LOGS, 0.0, True, True),
        ("/none.py", LOGS_NONE, None, True, False),
        ("/none.py", LOGS, math.nan, False, True),  # a damaged note
        ("/none.py", None, None, False, False),
        ("/none.py", "no: [settings", None, False, False),
    ],
)
def test_the_best_model_is_logged_if_the_run_wants_it_and_lacks_it(
    experiment_file: str | None,
    settings: str | None,
    logged_after: float | None,
    late: bool,
    is_logged: bool,
    sqlite: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, done = make_folder(tmp_path, sqlite, experiment_file=experiment_file), list[RunFolder]()
    append(folder, started(), steps(1, 3), ended())
    if settings is not None:
        folder.config.write_text(settings)
    if logged_after is not None:
        end = command.lookup.last_end(folder)
        assert end is not None
        note = json.dumps({"step": 3, "model_id": "m", "ended": end.time + logged_after})
        folder.logged_model.write_text(note if logged_after == logged_after else "{")
    if late:
        folder.late_model.touch()

    def log_best(folder: RunFolder, _: object) -> None:
        done.append(folder)
        folder.late_model.unlink(missing_ok=True)

    monkeypatch.setattr(best_model, "log_best", log_best)
    assert command.run(argparse.Namespace(run=folder.path.name, dir=tmp_path)) == 0
    assert done == [folder] * is_logged
    assert capsys.readouterr().out.count("\n") == 1, "nothing else is told"


def test_a_sync_with_nothing_to_do_imports_no_pytorch(sqlite: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, sqlite)
    append(folder, started(), steps(1, 3), ended())
    assert command.run(argparse.Namespace(run=folder.path.name, dir=tmp_path)) == 0
    words = ["sync", folder.path.name, "--dir", str(tmp_path)]
    script = f"import sys; from rankzero.cli.main import main; main({words!r})\n"
    script += "print({'torch', 'mlflow'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "complete" in done.stdout and done.stdout.endswith("set()\n"), done.stdout

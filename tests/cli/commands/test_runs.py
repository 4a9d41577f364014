"""`rankzero runs` records the ends of runs that died, and lists the others whatever happens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rankzero.cli import main
from rankzero.run_store import delivery_state
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync
from rankzero.tracking.delivery_status import Delivery, status
from support.runs import append, make_folder, settle, started, steps


@pytest.mark.parametrize(
    ("lock", "status", "error"),
    [("attempt.lock", "DIED", "its end cannot be recorded: "), ("recorder.lock", "FAILED", "")],
)
def test_a_dead_run_whose_lock_cannot_be_opened_hides_no_other(
    lock: str,
    status: str,
    error: str,
    new_store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(new_store, tmp_path / "mlflow.db")
    one, other = (make_folder(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}") for _ in range(2))
    for folder in (one, other):
        append(folder, started(), steps(1, 3))
        settle(folder)
    # It stands for the file of another user: nobody can open a folder for writing.
    (one.path / lock).unlink(missing_ok=True)
    (one.path / lock).mkdir()
    assert main.main(["runs", "--json", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    found = {run["name"]: run["status"] for run in json.loads(printed.out)}
    assert found == {one.path.name: status, other.path.name: "FAILED"}
    assert f"{one.path.name}: {error}[Errno " in printed.err


@pytest.mark.parametrize(("answers", "times"), [(False, 1), (True, 3)])
def test_a_store_is_asked_for_one_run_only_if_it_does_not_answer(
    answers: bool,
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked, deliver = list[RunFolder](), sync.deliver
    for _ in range(3):
        append(folder := make_folder(tmp_path, "http://127.0.0.1:1"), started(), steps(1, 3))
        settle(folder)
        tried = delivery_state.Retries(9, 1, 60.0, "away")  # as its courier left it
        path = delivery_state.path_of(folder, 0)
        delivery_state.save(path, delivery_state.DeliveryState(retries=tried))

    def counted(folder: RunFolder, patience: float) -> Delivery:
        asked.append(folder)
        if answers:  # It takes all but one upload.
            cursor = delivery_state.Cursor(offsets={folder.events.name: 10})
            state = delivery_state.DeliveryState(cursor=cursor, retries=tried)
            delivery_state.save(delivery_state.path_of(folder, 0), state)
            return status(folder)
        return deliver(folder, patience=patience / 50)

    monkeypatch.setattr(sync, "deliver", counted)
    assert main.main(["runs", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().err.count(": not in MLflow yet (") == 3 and len(asked) == times


def test_a_negative_number_of_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["runs", "-n", "-1", "--dir", str(tmp_path)]) == 2
    assert "-n -1: give the number of runs to show, 0 or more" in capsys.readouterr().err

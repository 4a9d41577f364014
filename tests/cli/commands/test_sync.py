"""`rankzero sync` of several runs, one of which goes away meanwhile."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from rankzero.cli.commands import sync as command
from rankzero.errors import FAILED
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync
from rankzero.tracking.deliverer import Deliverer
from support.runs import append, ended, make_folder, started, steps
from support.stores import list_runs


def test_folder_that_disappears_does_not_stop_other_deliveries(
    new_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    shutil.copy(new_store, tmp_path / "mlflow.db")
    made = [make_folder(tmp_path, uri) for _ in range(3)]
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
    status = {run.name: run.status for run in list_runs(uri)}
    assert {status[folder.path.name] for folder in (made[0], made[2])} == {"KILLED"}

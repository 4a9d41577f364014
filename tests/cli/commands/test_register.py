"""`rankzero register`: the best model comes back if MLflow has lost it."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import pytest
import torch

from rankzero import experiment_file
from rankzero.cli.commands import register
from rankzero.errors import RunFailed
from rankzero.launch.request import write_config
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store import checkpoint_files
from rankzero.tracking import sync
from support.paths import FIXTURES
from support.runs import append, ended, evaluated, make_folder, started


def test_a_model_that_is_gone_from_mlflow_is_logged_again(
    tmp_path: Path, sqlite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, artifacts = str(FIXTURES / "tiny.py"), str(tmp_path / "artifacts")
    folder = make_folder(tmp_path, sqlite, experiment_file=tiny, artifact_root=artifacts)
    experiment = experiment_file.load(tiny)()
    write_config(folder, experiment)
    append(folder, started(), ended())
    save = functools.partial(torch.save, {"model": experiment.model().state_dict()})
    target = checkpoint_files.folder_of(folder.checkpoints, 4)
    checkpoint_files.write(target, save, 4, {"val/accuracy": 0.9}, False)
    assert sync.deliver(folder).complete
    name = folder.path.name
    arguments = argparse.Namespace(run_name=name, model_name="ours", dir=tmp_path)
    assert register.run(arguments) == 0
    models = MlflowRuns(sqlite).models
    before = json.loads(folder.logged_model.read_text())["model_id"]
    models.delete_checkpoint(before)
    assert register.run(arguments) == 0
    after = json.loads(folder.logged_model.read_text())["model_id"]
    assert after != before and len(models.versions({after})) == 1
    # No evaluation of this run has a number.
    assert "models:/ours/2 is the newest model of" in capsys.readouterr().out
    append(folder, started(2), evaluated(4, 0.9), ended())
    assert register.run(arguments) == 0
    assert "models:/ours/2 is the best model of" in capsys.readouterr().out


def test_a_run_of_an_own_program_needs_log_model(tmp_path: Path, sqlite: str) -> None:
    folder = make_folder(tmp_path, sqlite, artifact_root=str(tmp_path / "artifacts"))
    append(folder, started(), ended())
    assert sync.deliver(folder).complete
    arguments = argparse.Namespace(run_name=folder.path.name, model_name="ours", dir=tmp_path)
    with pytest.raises(RunFailed, match=r"no model in MLflow: it ended without one; .*log_model"):
        register.run(arguments)

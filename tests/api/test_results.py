"""`rankzero.runs` and `rankzero.run`, on journals written for it."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

import pytest
import torch

import rankzero
from rankzero import config, experiment_file
from rankzero.api import results
from rankzero.events import RunEnded, StepsLogged
from rankzero.launch.request import write_config
from rankzero.run_store import checkpoint_files
from support.paths import FIXTURES
from support.runs import T0, append, ended, evaluated, make_folder, started, steps

TINY = FIXTURES / "tiny.py"


def test_runs_are_a_table(tmp_path: Path) -> None:
    for accuracy in (0.5, 0.9):
        folder = make_folder(tmp_path)
        append(
            folder,
            dataclasses.replace(started(lr=str(accuracy / 10)), time=T0 + accuracy),
            steps(1, 3),
            evaluated(3, accuracy),
            ended(metrics={"best": accuracy, "samples_per_second": 10.0}),
        )
    table = rankzero.runs(dir=tmp_path)
    assert list(table["best"]) == [0.9, 0.5] and list(table["params.lr"]) == [0.09, 0.05]
    assert set(table["status"]) == {"FINISHED"} and str(table["started"].dtype).endswith("UTC]")
    assert list(rankzero.runs("val/accuracy<0.9", dir=tmp_path)["metrics.val/accuracy"]) == [0.5]
    assert len(rankzero.runs("status=FAILED", dir=tmp_path)) == 0
    assert len(rankzero.runs(dir=tmp_path / "nowhere")) == 0


def test_run_has_its_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path)
    again = StepsLogged([2, 3], [T0, T0], {"train/loss": [9.0, 7.0]})
    append(
        folder,
        started(),
        steps(1, 2),
        evaluated(2, 0.6),
        started(2, step=1),
        again,
        evaluated(3, 0.5),
    )
    monkeypatch.chdir(tmp_path)
    run = rankzero.run(folder.path.name, dir=".")
    monkeypatch.chdir("/")
    assert run.status == "DIED" and run.reason == "" and run.best == 0.5
    assert run.metrics["train/loss"] == 7.0 and run.params["lr"] == 0.1
    table = run.history()
    assert list(table["step"]) == [1, 2, 3] and list(table["train/loss"]) == [1.0, 0.5, 7.0], (
        "the first values stay"
    )
    assert list(run.history("val/accuracy")["val/accuracy"]) == [0.6, 0.5]
    assert "### DIED: at step 3 of 100" in run.report and "val/accuracy 0.5" in repr(run)
    assert run.summary == {}
    append(folder, ended(metrics={"samples_per_second": 9.0, "train/loss": 6.0, "odd": "text"}))
    again = rankzero.run(folder.path.name, dir=tmp_path)
    assert again.summary == {"samples_per_second": 9.0} and again.metrics["train/loss"] == 7.0
    with pytest.raises(rankzero.UserError, match="its own program"):
        run.model()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("1e-05", 1e-05),
        ("32", 32),
        ("-3", -3),
        ("inf", float("inf")),
        ("true", True),
        ("none", None),
        ("cosine", "cosine"),
        ("1e", "1e"),
        ("1_000", "1_000"),
    ],
)
def test_params_have_types(text: str, value: object, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(key=text))
    found = rankzero.run(folder.path.name, dir=tmp_path).params["key"]
    assert found == value and type(found) is type(value)


def test_metric_is_that_of_its_highest_step(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    back = StepsLogged([9, -3], [T0, T0], {"train/loss": [0.25, 8.0], "short": [1.0]})
    append(folder, started(), evaluated(9, 0.75), back, steps(1, 3), evaluated(4, 0.5))
    append(folder, RunEnded(T0, "FINISHED", "finished", None, {"val/accuracy": 0.5, "val/f1": 0.5}))
    metrics = rankzero.run(folder.path.name, dir=tmp_path).metrics
    assert metrics == {
        "train/loss": 0.25,
        "short": 1.0,
        "val/accuracy": 0.75,
        "val/loss": 0.25,
        "val/f1": 0.5,
    }


def test_runs_and_comparisons_are_html_in_a_notebook(tmp_path: Path) -> None:
    folders = [make_folder(tmp_path) for _ in range(3)]
    for folder, rate in zip(folders, ("0.1", "0.2", "<b>0.3</b>"), strict=True):
        append(folder, started(lr=rate), steps(1, 4), evaluated(4, 0.6), ended())
    names = [folder.path.name for folder in folders]
    shown = rankzero.run(names[0], dir=tmp_path)._repr_html_()
    assert "<h3>FINISHED: trained</h3>" in shown and "<strong>0.6</strong>" in shown
    found = rankzero.comparison(*names, dir=tmp_path)
    assert list(found.table.columns) == ["kind", "key", *names]
    assert found.table.to_numpy().tolist() == [["Settings", "lr", "0.1", "0.2", "<b>0.3</b>"]]
    shown = found._repr_html_()
    assert "<td>0.2</td><td>&lt;b&gt;0.3&lt;/b&gt;</td>" in shown and all(n in shown for n in names)
    with pytest.raises(rankzero.UserError, match="no run is called"):
        rankzero.comparison(names[0], "absent", dir=tmp_path)


def test_checkpoints_are_loaded_by_step(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), ended())
    run = rankzero.run(folder.path.name, dir=tmp_path)
    with pytest.raises(rankzero.UserError, match="has no checkpoint on this disk"):
        run.load_checkpoint()
    for step, accuracy in ((1, 0.9), (2, 0.1)):
        save = functools.partial(torch.save, {"model": {"w": torch.tensor(step)}})
        target = checkpoint_files.folder_of(folder.checkpoints, step)
        checkpoint_files.write(target, save, step, {"val/accuracy": accuracy}, False)
    assert run.load_checkpoint()["model"]["w"] == 1, "the best one's"
    assert run.load_checkpoint(2)["model"]["w"] == 2
    # No journal has them, as those that a resume downloads.
    assert [one[:2] for one in run.checkpoints] == [(1, True), (2, False)]
    assert run.checkpoints[1].path == target
    with pytest.raises(rankzero.UserError, match="step_00000003 has no readable manifest"):
        run.load_checkpoint(3)
    (target / "state.pt").write_bytes(b"cut")
    with pytest.raises(rankzero.UserError, match="truncated or altered"):
        run.load_checkpoint(2)


def test_experiment_of_an_edited_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = "import rankzero\nclass P(rankzero.Experiment): ...\n"
    file = tmp_path / "edited_later.py"
    file.write_text(text)
    folder = make_folder(tmp_path, experiment_file=str(file))
    write_config(folder, experiment_file.load(str(file))())
    append(folder, started(), ended())
    run = rankzero.run(folder.path.name, dir=tmp_path)
    file.write_text(text)  # as a notebook's cell does that runs again
    run.experiment()
    file.write_text(f"{text}# edited\n")
    with pytest.raises(rankzero.UserError, match=r"\.py was edited since .* restart"):
        run.experiment()
    # One that this program began has trained the code in memory.
    results.Run(folder, is_own=True).experiment()


def test_run_returns_its_best_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, experiment_file=str(TINY))
    experiment = config.override(experiment_file.load(str(TINY))(), {"width": 8})
    write_config(folder, experiment)
    append(folder, started(), ended())
    run = rankzero.run(folder.path.name, dir=tmp_path)
    with pytest.raises(rankzero.UserError, match="no checkpoint"):
        run.model()
    for step, accuracy in ((1, 0.9), (2, 0.1)):
        model = experiment.model()
        torch.nn.init.constant_(model[0].weight, step)
        save = functools.partial(torch.save, {"model": model.state_dict()})
        target = checkpoint_files.folder_of(folder.checkpoints, step)
        checkpoint_files.write(target, save, step, {"val/accuracy": accuracy}, False)
    best = run.model()
    assert (
        best[0].weight.shape == (8, 8)
        and best[0].weight.unique().tolist() == [1.0]
        and not best.training
    )
    assert run.experiment() == experiment
    write_config(folder, config.override(experiment, {"width": 16}))
    with pytest.raises(rankzero.UserError, match="does not fit"):
        run.model()

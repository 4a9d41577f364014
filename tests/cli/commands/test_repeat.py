"""`rankzero repeat`, for real: folds, a run that fails, an interrupt, MLflow."""

from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path

import pytest

from rankzero.catalog.lookup import mlflow_id
from rankzero.cli.commands import repeat
from rankzero.confidence import half_width
from rankzero.launch.signals import SignalForwarder
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status
from rankzero.training.checkpoints import best_model
from support.commands import TINY, Command, last_end, losses, starts
from support.runs import make_folder
from support.stores import mlflow_runs

FOLDED = TINY.with_name("folded.py")
NAMES = [f"r-fold{fold}-seed{seed}" for fold in (0, 1) for seed in (0, 1)]


def mean_and_half_width(folders: dict[str, RunFolder]) -> tuple[float, float | None]:
    """Return what the journals of two folds on two seeds give, each fold as one value."""
    best = {name: last_end(folders[name]).metrics["best"] for name in NAMES}
    by_fold = [(best[f"r-fold{n}-seed0"] + best[f"r-fold{n}-seed1"]) / 2 for n in (0, 1)]
    return sum(by_fold) / 2, half_width(by_fold)


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_folds_and_seeds_become_one_mean_and_a_failed_run_is_trained_again(
    rankzero: Command,
) -> None:
    (rankzero.folder / "broken").touch()
    words = ("--over", "fold=0,1", "--seeds", 2, "train.epochs=1", "--run-name", "r")
    code, output = rankzero("repeat", FOLDED, *words)
    assert code == 1 and "1 of 4 runs are missing" in output, output
    assert "missing: fold=1, seed=1: FAILED, OSError: fold 1 is broken" in output, output
    runs = mlflow_runs(rankzero.folder)
    assert runs.keys() == {"r", *NAMES}
    assert {name: runs[name].status for name in NAMES} == {
        **dict.fromkeys(NAMES, "FINISHED"),
        NAMES[3]: "FAILED",
    }
    assert runs["r"].status == "FAILED" and "mlflow.parentRunId" not in runs["r"].tags
    assert {runs[name].tags["mlflow.parentRunId"] for name in NAMES} == {runs["r"].run_id}

    (rankzero.folder / "broken").unlink()
    rankzero.succeed("repeat", "r")
    folders = {run.path.name: run for run in rankzero.runs}
    assert [len(starts(folders[name])) for name in ("r", *NAMES)] == [2, 1, 1, 1, 2]
    runs, (mean, half) = mlflow_runs(rankzero.folder), mean_and_half_width(folders)
    parent = runs["r"]
    assert parent.status == "FINISHED" and runs[NAMES[3]].status == "FINISHED"
    assert parent.metrics["val/accuracy/mean"] == pytest.approx(mean)
    assert parent.metrics["val/accuracy/half_width"] == pytest.approx(half)
    assert {"val/loss/mean", "test/accuracy/half_width"} <= parent.metrics.keys(), parent.params
    note = parent.tags["mlflow.note.content"]
    assert f"val/accuracy {mean:.4g} ±" in note and "over 2 values of fold (4 runs)" in note
    stored = json.loads((folders["r"].artifacts / "repeat.json").read_text())["metrics"]
    assert stored["val/accuracy"]["mean"] == pytest.approx(mean)
    listed = rankzero("runs")[1]
    assert "r-fold0-seed0" not in listed and f"{mean:.4g}" in listed, "one entry, with the mean"
    assert f"val/accuracy {mean:.4g}" in rankzero("report", "r")[1]


@pytest.mark.timeout(200)
def test_ctrl_c_stops_with_a_checkpoint_and_the_repeat_continues_it(rankzero: Command) -> None:
    how = ("--nproc", 2, "--offline", "train.epochs=4")
    words = (*how, "--seeds", "3,", "--run-name", "r.pytorch", "step_seconds=0.02")
    process = rankzero.start("repeat", TINY, *words)
    first = rankzero.wait_for_step(5, "r.pytorch-seed3")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.wait() == 75 and "continue: " in output and "repeat r.pytorch" in output, output
    parent = RunFolder(first.path.with_name("r.pytorch"))
    assert last_end(first).status == last_end(parent).status == "KILLED"
    code, output = rankzero("repeat", "r.pytorch", "--seeds", "4,", "--offline")
    assert code == 0 and "run 1 of 2: seed=3" in output and "over 2 seeds" in output, output
    assert len(starts(first)) == 2
    code, output = rankzero("train", TINY, *how, "train.seed=3", "--run-name", "whole")
    assert code == 0 and losses(first) == losses(RunFolder(first.path.with_name("whole"))), output
    code, output = rankzero("repeat", "r.pytorch", "--offline")
    assert code == 0 and "run 1 of" not in output, "nothing is trained again"


@pytest.mark.timeout(200)
def test_a_deleted_run_is_left_out_and_not_trained_again(rankzero: Command) -> None:
    """MLflow's UI deletes an outlier, or a run that failed."""
    rankzero.succeed("repeat", TINY, "--seeds", 2, "--run-name", "r", "train.epochs=1")
    (child,) = (run for run in rankzero.runs if run.path.name == "r-seed1")
    MlflowRuns(child.identity.tracking_uri).deletion.delete(mlflow_id(child) or "")
    code, output = rankzero("repeat", "r")
    assert code == 0 and len(starts(child)) == 1 and "1 of 2 runs are missing" in output, output
    assert "missing: seed=1: DELETED" in output and "delete --restore r-seed1" in output, output
    parent = mlflow_runs(rankzero.folder)["r"].metrics
    best = [last_end(run).metrics["best"] for run in rankzero.runs if run.identity.parent]
    assert parent["val/accuracy/mean"] in best and math.isnan(parent["val/accuracy/half_width"])
    rankzero.succeed("delete", "--restore", "r-seed1")
    code, output = rankzero("repeat", "r")
    assert code == 0 and len(starts(child)) == 1 and "over 2 seeds." in output, output
    parent = mlflow_runs(rankzero.folder)["r"].metrics
    assert parent["val/accuracy/mean"] == pytest.approx(sum(best) / 2)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_strategies_are_values_to_repeat_over(rankzero: Command) -> None:
    over = ("--over", "train.strategy=ddp,zero1,fsdp", "--seeds", 1)
    code, output = rankzero("repeat", TINY, *over, "--nproc", 2, "--offline", "train.steps=6")
    assert code == 0 and "over 3 values of train.strategy (3 runs)" in output, output
    (parent,) = (run for run in rankzero.runs if run.identity.parent is None)
    curves = [list(losses(child).values()) for child in parent.children]
    assert len(curves) == 3 and len(curves[0]) == 6
    assert curves[1] == pytest.approx(curves[0]) and curves[2] == pytest.approx(curves[0])


def test_a_run_of_the_same_name_is_no_part_of_a_repeat(rankzero: Command) -> None:
    make_folder(rankzero.folder / "mlruns", name="r-seed1")
    code, output = rankzero("repeat", TINY, "--offline", "--run-name", "r", "--seeds", 2)
    assert code == 2 and "there is a run 'r-seed1' already, which is no part of" in output, output
    assert [run.path.name for run in rankzero.runs] == ["r-seed1"], "nothing is written"


def test_all_best_models_share_one_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0.3")
    parent, tried = make_folder(tmp_path, name="r"), list[float]()
    for name in ("r-seed0", "r-seed1", "r-seed2"):
        make_folder(tmp_path, name=name, parent="r").late_model.touch()
        parent.add_child(name)
    done = delivery_status.status(parent)._replace(done=True)
    monkeypatch.setattr(delivery_status, "status", lambda _: done)

    def log(_folder: RunFolder, _notice: object, _hurried: object, seconds: float) -> None:
        tried.append(seconds)
        time.sleep(0.2)

    monkeypatch.setattr(best_model, "log_best", log)
    repeat._deliver(parent, SignalForwarder(), offline=False)
    assert len(tried) == 2 and tried[1] < 0.15
    assert "best models that MLflow lacks: 3; " in capsys.readouterr().out


def test_each_mistake_gets_one_message(rankzero: Command) -> None:
    for words, says in (
        ((TINY, "--over", "fold=0,1"), "unknown key 'fold'"),
        ((TINY, "--over", "width=8,wide"), "width: expected int, got 'wide'"),
        ((TINY, "--over", "width=8,08"), "width=8, seed=0 and width=08, seed=0 are equal"),
        ((TINY, "--seeds", "no"), "--seeds takes their number"),
        ((TINY, "train.steps=9", "--over", "train.epochs=1,2"), "train.epochs=1 changes nothing"),
        (("nobody", "--seeds", 2), "no such experiment file: nobody"),
    ):
        code, output = rankzero("repeat", *words)
        assert code == 2 and says in output and "Traceback" not in output, output
    assert not rankzero.runs

"""Early stopping and the test set, with the real command."""

from __future__ import annotations

import json

import pytest

from rankzero.events import DataDescribed, Evaluated, Noticed
from support.commands import TINY, Command, events, last_end, losses, tracked

TESTED = TINY.with_name("tested.py")


@pytest.mark.slow
def test_a_run_killed_before_its_test_is_resumed_and_tested(rankzero: Command) -> None:
    kills = rankzero.folder / "kills"
    kills.touch()
    rankzero.environ["KILLS"] = str(kills)
    code, output = rankzero("train", TESTED, "--run-name", "killed", "--nproc", 2, "--offline")
    assert code == 1 and not kills.exists(), output
    (run,) = rankzero.runs
    assert last_end(run).status == "FAILED"

    output = rankzero.succeed("resume", "killed")
    assert "test/accuracy" in output and "nothing is left to train after step 15" in output
    assert max(losses(run)) == 15
    logged = events(run)
    evaluations = [event for event in logged if isinstance(event, Evaluated)]
    assert [event.step for event in evaluations] == [5, 10, 15, 5]
    assert set(evaluations[-1].metrics) == {"test/loss", "test/accuracy"}
    assert {event.context for event in logged if isinstance(event, DataDescribed)} == {
        "training",
        "validation/near",
        "validation/far",
        "test",
    }
    assert not any("is tested" in event.text for event in logged if isinstance(event, Noticed))
    end, delivered = last_end(run), tracked(run)
    assert end.reason.startswith("no better val/near/accuracy for 2 evaluations; best")
    accuracy = evaluations[-1].metrics["test/accuracy"]
    assert end.metrics["test/accuracy"] == accuracy == delivered.metrics["test/accuracy"]
    assert delivered.metrics["val/far/accuracy"] == evaluations[2].metrics["val/far/accuracy"]
    code, output = rankzero("report", "killed")
    assert code == 0 and "`test/accuracy` at step 5" in output

    code, output = rankzero("resume", "killed")
    assert code == 2 and "(no better val" in output and "train.patience=none" in output


def test_a_run_without_a_validation_set(rankzero: Command) -> None:
    file = TINY.with_name("unvalidated.py")
    run = ("train", file, "train.epochs=2", "train.mlflow.log_model=true")
    code, output = rankzero(*run, "--run-name", "blind", "--nproc", 2)
    assert code == 0 and "trained 12 steps" in output and "best" not in output, output
    logged = events(*rankzero.runs)
    assert [set(e.metrics) for e in logged if isinstance(e, Evaluated)] == [
        {"test/loss", "test/accuracy"}
    ]
    assert not any(isinstance(event, Noticed) for event in logged)
    code, output = rankzero("report", "blind")
    assert code == 0 and "`test/accuracy` at step 12" in output and "Best" not in output
    assert json.loads((rankzero.runs[0].path / "best_model.json").read_text())["step"] == 12
    code, output = rankzero("search", file)
    assert code == 2 and "error: a search compares trainings by a validation metric" in output


def test_a_run_is_tested_at_its_time_limit(rankzero: Command) -> None:
    settings = ("train.limits.max_minutes=0.005", "train.patience=none", "train.steps=100000")
    code, output = rankzero("train", TESTED, "--offline", "step_seconds=0.01", *settings)
    end = last_end(rankzero.runs[0])
    assert code == 0 and end.status == "FINISHED" and "test/accuracy" in end.metrics, output
    assert end.reason.startswith("reached train.limits.max_minutes at step")

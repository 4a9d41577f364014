"""The means of a repeat and their intervals, on numbers made by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from rankzero.catalog.summary import read_summary
from rankzero.cli.display.terminal import print_table
from rankzero.confidence import student_t
from rankzero.events import DataDescribed, Evaluated
from rankzero.experiment import Goal
from rankzero.experiment_file import CODE
from rankzero.housekeeping.deletion import mark
from rankzero.repeats import results
from rankzero.repeats.plan import Repetition
from rankzero.repeats.results import RunResult
from rankzero.reporting.run_facts import facts_of
from rankzero.run_store.folder import RunFolder
from support.runs import T0, append, ended, evaluated, make_folder, started

GOAL = Goal("val/accuracy", "max")


def result(fold: int | None, seed: int, value: float, status: str = "FINISHED") -> RunResult:
    values = () if fold is None else (("fold", str(fold)),)
    metrics = {"val/accuracy": value} if status == "FINISHED" else {}
    return RunResult(Repetition(values, seed), "r", status, "out of luck", metrics)


def test_seeds_of_one_configuration_each_count() -> None:
    found = results.means([result(None, seed, 0.8 + seed / 10) for seed in range(3)])
    mean = found["val/accuracy"]
    assert (mean.mean, mean.lowest, mean.highest, mean.runs) == pytest.approx((0.9, 0.8, 1.0, 3))
    assert mean.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3))


def test_seeds_of_a_fold_count_as_one_value() -> None:
    """Two seeds on the same fold share its data: their agreement proves nothing."""
    runs = [result(fold, seed, 0.5 + fold / 10) for fold in range(3) for seed in range(4)]
    mean = results.means(runs)["val/accuracy"]
    assert mean.mean == pytest.approx(0.6) and mean.runs == 12
    assert mean.half_width == pytest.approx(student_t(2) * 0.1 / math.sqrt(3))
    assert results.sentence(runs, GOAL) == (
        "val/accuracy 0.6 ± 0.25, Student's 95 % interval over 3 values of fold (12 runs)."
    )


def test_a_failed_run_is_missing_and_not_zero() -> None:
    runs = [result(0, 0, 0.5), result(1, 0, 0.7), result(2, 0, 0.0, "FAILED"), result(3, 0, 0, "")]
    assert results.means(runs)["val/accuracy"].mean == pytest.approx(0.6)
    assert results.sentence(runs, GOAL).endswith("2 of 4 runs are missing.")
    assert results.problems(runs, GOAL) == ["missing: fold=2, seed=0: FAILED, out of luck"]
    page = results.page("name", runs, GOAL)
    assert "Missing: fold=2" in page and "rankzero repeat name" in page and "not run" in page


def test_runs_with_other_settings_or_other_data_are_named(tmp_path: Path) -> None:
    """Data that was edited between, and a run that was resumed alone with other settings."""

    def read(seed: int, digest: str, code: str = "c1", **changed: str) -> RunResult:
        folder = make_folder(tmp_path)
        params = {"train.seed": str(seed), "world_size": str(seed + 1), **changed}
        data = DataDescribed(T0, "training", "Mine", digest, "all", "code", "e.py", 9, {})
        start = dataclasses.replace(started(**params), environment={f"{CODE}e.py": code})
        append(folder, start, data, evaluated(30, 0.6), ended())
        return results.read(Repetition((), seed), folder)

    same = [read(seed, "d1") for seed in range(3)]
    assert results.problems(same, GOAL) == []
    mixed = [*same[:2], read(2, "d2"), read(3, "d1", lr="0.001", new="1"), read(4, "d1", "c2")]
    assert results.problems(mixed, GOAL) == [
        "differs: seed=2 has training data d2 and not d1",
        "differs: seed=3 has lr 0.001 and not 0.1",
        "differs: seed=4 has rankzero.code.e.py c2 and not c1",
    ]
    page = results.page("name", mixed, GOAL)
    assert "Differs: seed=3" in page
    assert results.problems([read(0, "d1"), read(1, "d2")], GOAL)
    by_seed = [read(seed, f"d{seed}") for seed in range(3)]
    assert results.problems(by_seed, GOAL) == [], "an experiment that divides its data by the seed"


def test_a_run_that_somebody_deleted_does_not_count(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), evaluated(30, 0.6), ended())
    mark(folder)
    found = [results.read(Repetition((), 0), folder), result(None, 1, 0.5), result(None, 2, 0.7)]
    assert results.means(found)["val/accuracy"].mean == pytest.approx(0.6)
    assert found[0].settled and not found[0].finished, "it is not trained again"
    (line,) = results.problems(found, GOAL)
    assert line.startswith("missing: seed=0: DELETED, `rankzero delete --restore run-"), line


def test_a_finished_run_without_the_goal_is_named_and_not_counted(tmp_path: Path) -> None:
    """A NaN is no value of the goal's metric."""
    folder, reason = make_folder(tmp_path), "trained; val/accuracy was never a number"
    append(folder, started(), evaluated(30, float("nan")), ended(reason=reason))
    odd = results.read(Repetition((), 2), folder)
    found = [result(None, 0, 0.5), result(None, 1, 0.7), odd]
    assert "interval over 2 of 3 seeds." in results.sentence(found, GOAL)
    assert results.problems(found, GOAL) == [f"no val/accuracy: seed=2: {reason}"]


def test_one_run_has_no_interval() -> None:
    assert results.means([result(None, 0, 0.5)])["val/accuracy"].half_width is None
    assert "no interval" in results.sentence([result(None, 0, 0.5)], GOAL)
    assert "No run finished" in results.sentence([result(None, 0, 0.5, "FAILED")], GOAL)
    assert results.flat(results.means([result(None, 0, 0.5)])) == {"val/accuracy/mean": 0.5}


def test_a_run_counts_with_its_best_evaluation_and_its_test(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    tested = Evaluated(T0 + 90, 60, {"test/accuracy": 0.55, "test/odd": float("nan")}, False)
    append(folder, started(), evaluated(30, 0.6), evaluated(60, 0.4, best=False), tested, ended())
    found = results.read(Repetition((), 0), folder)
    assert found.finished and list(found.metrics) == ["val/accuracy", "test/accuracy", "val/loss"]
    assert found.metrics["val/accuracy"] == 0.6 and found.metrics["val/loss"] == 0.4
    nothing = results.read(Repetition((), 0), RunFolder(tmp_path / "nowhere"))
    assert nothing.status == "" and not nothing.metrics


def test_a_run_counts_without_the_evaluations_that_a_return_abandoned(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), evaluated(20, 0.5), evaluated(40, 0.95), started(2, step=20))
    assert facts_of(folder).best == read_summary(folder).best == 0.5
    assert facts_of(folder).best_step == 20
    append(folder, evaluated(40, 0.7), evaluated(60, 0.8), ended(metrics={"best": 0.8}))
    assert facts_of(folder).best == read_summary(folder).best == 0.8
    assert results.read(Repetition((), 0), folder).metrics["val/loss"] == 1 - 0.8
    append(folder, started(3))
    assert facts_of(folder).best is read_summary(folder).best is None


def test_tables_are_whole_in_a_pipe_and_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    long = "val/" + "a_long_name_of_a_metric" * 9
    run = RunResult(Repetition((("fold", "0"),), 0), "r", "FINISHED", "", {long: 0.123456})
    print_table("means", *results.metric_table([run]))
    printed: Any = capsys.readouterr().out
    assert long in printed and "0.1235" in printed
    print_table("runs", *results.run_table([result(1, 2, 0.25)], GOAL))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80 and "0.25" in printed


def test_values_and_reasons_of_a_user_break_no_page() -> None:
    run = RunResult(Repetition((("ops", "a|b"),), 0), "r", "FAILED", "no `x` <class 'int'>", {})
    text = results.page("r", [run], GOAL)
    assert "a\\|b" in text and "no 'x' ‹class 'int'>" in text


def test_a_wide_interval_is_a_whole_number() -> None:
    runs = [result(None, seed, value) for seed, value in enumerate((2000.0, 2345.0, 2600.0))]
    assert "2,315 ± 748, " in results.sentence(runs, GOAL)
    assert results.metric_table(runs)[1][0][2] == "± 748"

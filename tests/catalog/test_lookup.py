"""Summaries of the runs on this disk: read from both ends of a journal, cached after the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from rankzero.catalog import filters, lookup, summary, summary_cache
from rankzero.catalog.summary import Summary
from rankzero.cli import main
from rankzero.errors import UserError
from rankzero.events import ParamsLogged, RunStarted, StepsLogged, TagsSet
from rankzero.metric_names import SPEED
from rankzero.reporting import run_facts
from rankzero.run_store import delivery_state
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.provenance import OWN_LOOP
from rankzero.tracking.deliverer import Deliverer
from support.runs import T0, append, ended, evaluated, make_folder, saved, settle, started, steps


def test_a_summary_has_the_status_and_the_newest_values(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, parent="study")
    append(folder, started(), steps(1, 20), evaluated(10, 0.7), evaluated(20, 0.6, best=False))
    going = lookup.listed(tmp_path / "runs")[0]
    assert (going.status, going.best, going.reason, going.parent) == ("DIED", 0.7, "", "study")
    assert going.metrics["val/accuracy"] == 0.6 and going.metrics["train/loss"] == 1 / 20
    append(folder, ended(metrics={"best": 0.7, "samples_per_second": 9.0}))
    done = lookup.listed(tmp_path / "runs")[0]
    assert (done.status, done.best, done.samples_per_second, done.seconds) == (
        "FINISHED",
        0.7,
        9.0,
        100.0,
    )
    assert done.undelivered and done.metrics["whole_run/best"] == 0.7
    append(folder, started(2, step=20))
    assert lookup.listed(tmp_path / "runs")[0].status == "DIED"


def test_figures_of_two_attempts_do_not_mix(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    speed, interval = "samples_per_second", "samples_per_second_half_width"
    append(folder, started(), ended("FAILED", metrics={speed: 9.0, interval: 1.0}))
    append(folder, started(2, step=20), ended("KILLED"))
    assert summary.read_summary(folder).details().metrics[f"whole_run/{interval}"] == 1.0
    append(folder, started(3, step=20), ended(metrics={speed: 7.0}))
    # This one fails in model().
    append(folder, started(4, step=20), ended("FAILED", metrics={"steps": 20.0}))
    assert summary.read_summary(folder).details().metrics == {
        f"whole_run/{speed}": 7.0,
        "whole_run/steps": 20.0,
    }


def test_an_attempt_that_only_evaluated_leaves_the_run_its_speed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(
        folder,
        started(),
        steps(1, 20),
        StepsLogged([20], [T0 + 20], {SPEED: [7.0]}),
        ended("KILLED"),
    )
    append(folder, started(2, step=20), evaluated(20, 0.7), ended(metrics={"best": 0.7}))
    assert summary.read_summary(folder).samples_per_second == 7.0


def test_a_failed_attempt_leaves_the_run_the_best_value_that_mlflow_has(tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), started(), evaluated(20, 0.6, best=False), ended())
    curves = delivery_state.Curves(best=0.7)
    state = delivery_state.DeliveryState(curves=curves)
    delivery_state.save(delivery_state.path_of(folder, 0), state)
    append(folder, started(2), ended("FAILED"))
    assert summary.read_summary(folder).best == 0.7


def test_a_killed_run_that_is_not_in_mlflow_has_its_best_value(tmp_path: Path) -> None:
    many = (steps(n, n) for n in range(2, 3000))
    last = evaluated(3000, 0.6, best=False)
    append(folder := make_folder(tmp_path), started(), evaluated(1, 0.97), *many, last)
    assert summary.read_summary(folder).best == 0.97
    append(folder, ended("FAILED"))
    assert summary.read_summary(folder).best == 0.97


def test_a_resumed_run_has_the_settings_and_the_goal_of_its_newest_attempt(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, dataclasses.replace(started(lr="0.1"), environment=origin("old", team="a")))
    append(folder, evaluated(10, 0.7), ended(metrics={"best": 0.7}))
    now = {"lr": "0.2", "goal.metric": "val/loss", "goal.mode": "min"}
    again = dataclasses.replace(started(2, 10, **now), environment=origin("new"))
    append(folder, again, ended("FAILED"))
    found = summary.read_summary(folder)
    assert (found.started, found.goal, found.best, found.data) == (T0, "val/loss", None, "new")
    assert (found.params["lr"], found.tags) == ("0.2", {"team": "a"})
    append(folder, dataclasses.replace(again, environment={}), ended("FAILED"))
    assert summary.read_summary(folder).data == "new", "an attempt that failed in data()"
    curves = delivery_state.Curves(best=0.3, goal="val/loss")
    state = delivery_state.DeliveryState(curves=curves)
    delivery_state.save(delivery_state.path_of(folder, 0), state)
    assert summary.read_summary(folder).best == 0.3
    delivery_state.path_of(folder, 0).unlink()
    # Beyond the end that a list reads, and more than one attempt ago.
    many = (steps(n, n) for n in range(20, 9000))
    third = dataclasses.replace(again, attempt=3)
    append(folder, third, evaluated(20, 0.6), *many, ended(metrics={"best": 0.4}))
    found = summary.read_summary(folder)
    assert (found.params["lr"], found.goal, found.best) == ("0.2", "val/loss", 0.4)
    assert run_facts.facts_of(folder).best == 0.4


def test_the_time_between_two_attempts_does_not_count(tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), started(), ended(at=T0 + 10))
    # The machine of the second one went down, so it has no end.
    append(folder, started(2, step=1000), steps(1001, 1020), started(3, step=5000))
    append(folder, ended(at=T0 + 5003))
    assert summary.read_summary(folder).seconds == 33.0 == run_facts.facts_of(folder).duration


def test_params_and_tags_that_a_program_adds_are_known(tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), started(lr="0.1"))
    append(folder, ParamsLogged(T0, {"dropout": "0.3"}), TagsSet(T0, {"team": "ops", "at": "1"}))
    # Without a config, and of another program's own loop.
    again = RunStarted(T0 + 9, {"lr": "0.2"}, {OWN_LOOP: "true"}, 2)
    append(folder, again, TagsSet(T0 + 9, {"at": "2", "mlflow.note.content": "no tag"}), ended())
    found, facts = summary.read_summary(folder), run_facts.facts_of(folder)
    assert found.tags == facts.tags == {"host": "here", "team": "ops", "at": "2"}
    assert found.params == facts.params
    assert (found.params["lr"], found.params["dropout"]) == ("0.2", "0.3")
    conditions = [filters.parse(text) for text in ("team=ops", "dropout<0.5")]
    assert filters.select([found], conditions) == [found]
    append(folder, started(3, lr="0.4"))
    assert "dropout" not in summary.read_summary(folder).params, "an experiment has all its params"


def origin(digest: str, **tags: str) -> dict[str, str]:
    return {"rankzero.data.training": digest, **tags}


def test_a_long_journal_is_read_from_its_end(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), evaluated(1, 0.4), *(steps(n, n) for n in range(2, 3000)))
    found = summary.read_summary(folder)
    assert found.best == 0.4 and found.metrics["train/loss"] == 1 / 2999
    assert len(summary.newest_events(folder.events, max_bytes=1 << 13)) < 200


def test_the_last_report_of_an_ended_run_is_read_completely(tmp_path: Path) -> None:
    """A report may be several events. If the journal goes on, earlier reports are read as well."""
    folder = make_folder(tmp_path)
    for last in (10, 20):
        speeds = {
            key: [float(last)]
            for key in (SPEED, "lr", "throughput/step_seconds", "throughput/data_wait_fraction")
        }
        append(
            folder,
            *([started()] if last == 10 else []),
            steps(last - 9, last),
            steps(last - 9, last, "train/aux"),
        )
        append(folder, StepsLogged([last], [T0 + last], speeds), evaluated(last, last / 100))
    assert len(summary.newest_events(folder.events)) == 9
    append(folder, ended())
    assert len(summary.newest_events(folder.events)) == 5
    found = summary.read_summary(folder)
    assert (
        found.metrics["train/loss"] == found.metrics["train/aux"] == 1 / 20
        and found.metrics[SPEED] == 20.0
    )
    assert (found.metrics["val/accuracy"], found.seconds, found.params["lr"]) == (0.2, 100.0, "0.1")
    append(folder, started(2, step=20))
    assert len(summary.newest_events(folder.events)) == 11


def test_reading_a_long_journal_without_an_evaluation_takes_linear_time(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), *(steps(n, n) for n in range(1, 8000)), ended())
    before = time.process_time()
    assert summary.read_summary(folder).metrics["train/loss"] == 1 / 7999
    # It takes 0.1 s, and took 10 s when each event was read several times.
    assert time.process_time() - before < 3.0


def test_an_ended_run_is_read_once(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for number in range(3):
        folder = make_folder(tmp_path)
        append(folder, dataclasses.replace(started(), time=T0 + number), ended())
        settle(folder)
    first = lookup.listed(runs)
    assert [run.started for run in first] == [T0 + 2, T0 + 1, T0]
    cache = runs / summary_cache.HEADS
    cache.write_text(cache.read_text().replace('"trained"', '"cached: "'))
    assert [run.reason[:7] for run in lookup.listed(runs)] == ["cached:"] * 3
    append(first[1].folder, started(2), ended("FAILED", "no"))
    assert [run.reason[:7] for run in lookup.listed(runs)] == ["cached:", "no", "cached:"]


def test_a_cache_that_cannot_be_read_or_written_costs_only_time(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    append(folder := make_folder(tmp_path), started(), ended())
    settle(folder)
    first = lookup.listed(runs)
    (runs / summary_cache.HEADS).write_text("torn\n[1]\n")
    assert plain(lookup.listed(runs)) == plain(first)
    (runs / summary_cache.HEADS).unlink()
    (runs / summary_cache.HEADS).mkdir()
    assert plain(lookup.listed(runs)) == plain(first)


# Of a row: the folder's name, the times of its files, and the fields of a summary from `name` on.
FIELDS = ("folder", "signature", *Summary._fields[2:])


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("odd", [[], {"lr": []}, [None]])
def test_a_cached_summary_with_odd_values_is_read_again(
    field: str, odd: object, tmp_path: Path
) -> None:
    before, row, _ = cached(tmp_path)
    row[FIELDS.index(field)] = odd
    (tmp_path / "runs" / summary_cache.HEADS).write_text(f"{json.dumps(row)}\n")
    assert plain(lookup.listed(tmp_path / "runs")) == plain([before])


@pytest.mark.parametrize(
    "odd", ["", "torn", "[]", "[1,2,3]", '[{"lr":1},{},{}]', '[{},{"x":"y"},{}]', "[" * 10**5]
)
def test_cached_details_with_odd_values_are_read_again(odd: str, tmp_path: Path) -> None:
    before, row, _ = cached(tmp_path)
    line = f"{json.dumps(row[0])}\t{row[1]}\t{odd}\n"
    (tmp_path / "runs" / summary_cache.DETAILS).write_text(line)
    (found,) = lookup.listed(tmp_path / "runs")
    assert plain([found]) == plain([before]) and found.params["lr"] == "1"


def test_torn_lines_of_the_cache_cost_no_others(tmp_path: Path) -> None:
    _, row, details = cached(tmp_path)
    row[FIELDS.index("reason")] = "cached"
    lines = f'["torn\n{json.dumps(row)}\n["torn", "at the\n'
    (tmp_path / "runs" / summary_cache.HEADS).write_text(lines)
    changed = details.replace('"lr":"1"', '"lr":"2"')
    (tmp_path / "runs" / summary_cache.DETAILS).write_text(f'"torn\t1\n{changed}\n"torn')
    (found,) = lookup.listed(tmp_path / "runs")
    assert found.reason == "cached" and found.params["lr"] == "2"


@pytest.mark.parametrize("lost", [summary_cache.DETAILS, summary_cache.HEADS])
def test_one_file_of_the_cache_that_is_lost_is_made_again(lost: str, tmp_path: Path) -> None:
    before, _, _ = cached(tmp_path)
    (tmp_path / "runs" / lost).unlink()
    for _ in range(3):
        (found,) = lookup.listed(tmp_path / "runs")
        assert plain([found]) == plain([before])
    files = [tmp_path / "runs" / name for name in (summary_cache.HEADS, summary_cache.DETAILS)]
    assert len(files[0].read_text().splitlines()) == 1 and files[1].exists()
    (found,) = lookup.listed(tmp_path / "runs")
    shutil.move(found.path, tmp_path / "moved")
    assert found.params["lr"] == "1"


def test_cache_of_an_earlier_version_is_removed_and_odd_bytes_cost_one_line(tmp_path: Path) -> None:
    old = tmp_path / "runs" / ".summaries.jsonl"
    old.parent.mkdir()
    old.write_text("größe\t1 1 1\t{}\t[]\n")
    cached(tmp_path)
    assert not old.exists()
    heads = tmp_path / "runs" / summary_cache.HEADS
    line = heads.read_bytes()
    heads.write_bytes("größe\n".encode() + line)
    lookup.listed(tmp_path / "runs")
    assert heads.read_bytes() == "größe\n".encode() + line, "it was read again"


def plain(runs: list[Summary]) -> list[dict[str, Any]]:
    return [run.fields() for run in runs]


def cached(tmp_path: Path) -> tuple[Summary, list[Any], str]:
    """Return the summary of one run, its row in the cache, and the line with its details."""
    append(folder := make_folder(tmp_path), started(lr="1"), steps(1, 3), ended())
    settle(folder)
    (found,) = lookup.listed(tmp_path / "runs")
    row = json.loads((tmp_path / "runs" / summary_cache.HEADS).read_text())
    return found, row, (tmp_path / "runs" / summary_cache.DETAILS).read_text().rstrip("\n")


def test_a_run_that_changed_just_now_is_not_cached(tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), started(), ended())
    lookup.listed(tmp_path / "runs")
    assert not (tmp_path / "runs" / summary_cache.HEADS).exists()
    settle(folder)
    lookup.listed(tmp_path / "runs")
    assert (tmp_path / "runs" / summary_cache.HEADS).exists()


def test_checkpoints_that_a_person_deletes_count_no_more(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    append(folder, started(), saved(folder, 3, size=1 << 16), ended())
    for path in (folder.checkpoints, folder.events, folder.path):
        os.utime(path, (1e9, 1e9))
    before = lookup.listed(tmp_path / "runs")[0].bytes
    shutil.rmtree(folder.checkpoints / "step_00000003")
    assert lookup.listed(tmp_path / "runs")[0].bytes <= before - (1 << 16)


def test_a_delivery_shows_in_the_next_list(tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), started(), ended())
    settle(folder)
    (before,) = lookup.listed(tmp_path / "runs")
    state = delivery_state.load(path := delivery_state.path_of(folder, 0))
    cursor = dataclasses.replace(
        state.cursor, offsets={folder.events.name: folder.events.stat().st_size}
    )
    delivery_state.save(path, dataclasses.replace(state, cursor=cursor))
    (after,) = lookup.listed(tmp_path / "runs")
    assert before.undelivered and not after.undelivered
    for is_late in (True, False):
        folder.late_model.touch() if is_late else folder.late_model.unlink()
        settle(folder, 500.0 - is_late)
        assert [run.undelivered for run in lookup.listed(tmp_path / "runs")] == [is_late]


@pytest.mark.parametrize("name", [b"m\xfcn", "a\u2028b".encode(), b"a\nb", b"a\tb"])
def test_a_folder_with_an_odd_name_does_not_break_the_list(name: bytes, tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), started(), ended())
    moved = folder.path.rename(folder.path.with_name(os.fsdecode(name)))
    settle(RunFolder(moved))
    before = lookup.listed(tmp_path / "runs")
    assert [run.folder.path for run in before] == [moved]
    assert plain(lookup.listed(tmp_path / "runs")) == plain(before)


def test_outdated_lines_of_the_cache_are_dropped(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    for attempt in range(1, 8):
        append(folder, started(attempt), ended(at=T0 + attempt))
        settle(folder, seconds=1000.0 - attempt)
        [run] = lookup.listed(tmp_path / "runs", spare_lines=2)
        assert run.seconds == sum(range(attempt + 1))
    assert len((tmp_path / "runs" / summary_cache.HEADS).read_text().splitlines()) <= 4


def test_a_run_is_found_by_its_id_in_mlflow(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, mlflow_run_id="abc")
    append(folder, started(), ended())
    runs = tmp_path / "runs"
    assert lookup.find(runs, "abc") == lookup.find(runs, folder.path.name) == folder
    assert lookup.find(runs, "") is None and lookup.find(runs, "..") is None
    with pytest.raises(UserError, match=folder.path.name):
        lookup.require(runs, "nobody")
    with pytest.raises(UserError, match="there are no runs"):
        lookup.require(tmp_path / "nowhere", "nobody")


def test_run_that_was_renamed_in_mlflow_is_found_and_listed_by_both_names(
    tmp_path: Path, sqlite: str
) -> None:
    from mlflow import MlflowClient

    folder, runs = make_folder(tmp_path, sqlite), tmp_path / "runs"
    append(folder, started(), ended())
    deliverer = Deliverer(folder)
    deliverer.hasten()
    while deliverer.work() or not deliverer.complete:
        pass
    assert deliverer.state.run_id is not None
    MlflowClient(sqlite).update_run(deliverer.state.run_id, name="the good one")
    for _ in range(2):  # the second list is from the cache
        [run] = lookup.listed(runs)
        assert (run.name, run.mlflow_name) == (folder.identity.name, "the good one")
    for name in ("the good one", folder.path.name, deliverer.state.run_id):
        assert lookup.require(runs, name) == folder
    code = main.main(["report", "the good one", "--dir", str(tmp_path)])
    assert code == 0, "every command looks a run up in the same way"
    (tmp_path / "mlflow.db").write_bytes(b"broken")
    assert [run.shown_name for run in lookup.listed(runs)] == [folder.identity.name]


def test_names_in_mlflow_may_hold_anything_and_be_of_several_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "lr [v2] [/]\x1b[2J"
    made = [make_folder(tmp_path, mlflow_run_id=run_id) for run_id in ("a", "b")]
    for folder in made:
        append(folder, started(), ended())
    name_in_mlflow(tmp_path, a=name, b=name)
    assert main.main(["runs", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("lr [v2] [/]\\x1b[2J ") == 2
    assert main.main(["runs", "--json", "--dir", str(tmp_path)]) == 0
    found = {(one["name"], one["mlflow_name"]) for one in json.loads(capsys.readouterr().out)}
    assert found == {(folder.path.name, name) for folder in made}
    with pytest.raises(UserError, match=f"2 runs have .*{made[0].path.name}"):
        lookup.find(tmp_path / "runs", name)
    assert lookup.find(tmp_path / "runs", made[0].path.name) == made[0]
    assert lookup.find(tmp_path / "runs", "b") == made[1]


def name_in_mlflow(root: Path, **names: str) -> None:
    """Make the embedded store with the names of runs, by their ids."""
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as store, store:
        store.execute("CREATE TABLE runs (run_uuid, name, lifecycle_stage)")
        store.execute("CREATE TABLE experiments (experiment_id, artifact_location, creation_time)")
        rows = [(run_id, name, "active") for run_id, name in names.items()]
        store.executemany("INSERT INTO runs VALUES (?, ?, ?)", rows)


def test_a_name_that_is_shown_for_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, runs = {"mon": "a", "tue": "b", "wed": "c", "thu": "e"}, tmp_path / "runs"
    for name, run_id in ids.items():
        append(make_folder(tmp_path, name=name, mlflow_run_id=run_id), started(), ended())
    # mlflow itself made the last one, which has no folder.
    name_in_mlflow(tmp_path, a="mon-bad", b="mon", c="wed", e="thu", d="wed")
    for verb in (("report", "mon"), ("export", "mon"), ("register", "mon", "csv")):
        assert main.main([*verb, "--dir", str(tmp_path)]) == 2
        assert "give the MLflow run id, a or b," in capsys.readouterr().err
    found = {word: lookup.require(runs, word).path.name for word in ("a", "b", "mon-bad", "wed")}
    assert found == {"a": "mon", "b": "tue", "mon-bad": "mon", "wed": "wed"}
    # A scheduler repeats `resume mon`, and means the folder.
    assert (found_here := lookup.find(runs, "mon")) and found_here.path.name == "mon"
    assert lookup.require(runs, "tue").path.name == "tue"

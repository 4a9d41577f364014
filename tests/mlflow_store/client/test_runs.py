"""Runs, points and checkpoints: the same contract on SQLite and through MLflow's server."""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow.exceptions import MlflowException

from rankzero.errors import UserError
from rankzero.events import CheckpointSaved, RunStarted
from rankzero.mlflow_store.client import MlflowRuns, RunRecord
from rankzero.mlflow_store.client.artifact_locations import _ArtifactLocation
from rankzero.mlflow_store.items import MetricPoint
from rankzero.mlflow_store.uris import NoSuchRun, RunGone, TrackingError
from rankzero.permanent_errors import NeverAccepted, refusal
from rankzero.run_store.folder import Identity, RunFolder
from support.runs import T0, ended, make_folder, saved, started


@pytest.fixture(params=["sqlite", "server"])
def uri(request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        return str(request.getfixturevalue("sqlite"))
    return str(request.getfixturevalue("server").uri)


@pytest.fixture
def tracker(uri: str) -> MlflowRuns:
    return MlflowRuns(uri)


@pytest.fixture
def folder(tmp_path: Path, uri: str) -> RunFolder:
    return make_folder(tmp_path, uri)


@pytest.fixture
def run(tracker: MlflowRuns, folder: RunFolder) -> RunRecord:
    return tracker.open_run(folder.identity, T0)


def points(count: int, key: str = "train/loss") -> list[MetricPoint]:
    return [MetricPoint(key, 1.0 / n, int(T0) * 1000 + n, n) for n in range(1, count + 1)]


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("state.pt"))


def link(event: CheckpointSaved) -> Any:
    return lambda model_id: [
        MetricPoint(key, value, int(event.time) * 1000, event.step, model_id)
        for key, value in event.metrics.items()
    ]


def test_opening_again_finds_the_same_run(
    tracker: MlflowRuns, folder: RunFolder, run: RunRecord
) -> None:
    tracker.log_metrics(run.run_id, points(7))
    again = tracker.open_run(folder.identity, time.time())
    assert again.run_id == run.run_id
    assert again.marks == {"train/loss": 7}
    record = tracker.find_run(run.run_id)
    assert record == tracker.find_run(folder.identity.name)
    assert (record.name, record.status) == (folder.identity.name, "RUNNING")
    assert record.tags["rankzero.uuid"] == folder.identity.uuid
    assert tracker.experiment_name(run.experiment_id) == "tests"


def test_a_run_that_a_slow_server_created_twice_is_the_one_with_the_points(
    tracker: MlflowRuns, folder: RunFolder, run: RunRecord
) -> None:
    client, tags = tracker._client, {"rankzero.uuid": folder.identity.uuid}
    named = {"start_time": int(T0 * 1000), "run_name": folder.identity.name, "tags": tags}
    other = client.create_run(run.experiment_id, **named)
    # MLflow gives the lower id of two that are equal.
    used = max(run.run_id, other.info.run_id)
    tracker.start_attempt(used, started())
    found = tracker.find_open_run(folder.identity)
    assert found is not None and found.run_id == used
    assert tracker.find_run(folder.identity.name).run_id == used


def test_a_name_of_several_runs_is_refused_with_their_ids(
    tracker: MlflowRuns, folder: RunFolder, run: RunRecord
) -> None:
    # Another tool's run, newer than ours, and another person's.
    tracker._client.create_run(run.experiment_id, run_name=run.name)
    assert tracker.find_run(run.name).run_id == run.run_id
    theirs = dataclasses.replace(folder.identity, uuid=f"{run.run_id}0", experiment="theirs")
    other = tracker.open_run(theirs, T0)
    with pytest.raises(UserError, match=f"give the MLflow run id, .*{run.run_id}") as raised:
        tracker.find_run(run.name)
    assert other.run_id in str(raised.value)
    assert tracker.find_run(run.name, "tests").run_id == run.run_id


def test_a_given_run_id_is_opened(
    tracker: MlflowRuns, run: RunRecord, tmp_path: Path, uri: str
) -> None:
    other = make_folder(tmp_path / "other machine", uri, mlflow_run_id=run.run_id)
    assert tracker.open_run(other.identity, T0).run_id == run.run_id


def test_a_child_run_names_its_parent(
    tracker: MlflowRuns, run: RunRecord, tmp_path: Path, uri: str
) -> None:
    child = tracker.open_run(
        make_folder(tmp_path / "child", uri, parent_run_id=run.run_id).identity, T0
    )
    assert tracker.find_run(child.run_id).tags["mlflow.parentRunId"] == run.run_id


def test_sending_a_batch_again_changes_nothing(tracker: MlflowRuns, run: RunRecord) -> None:
    batch = [*points(1000), MetricPoint("train/nan", math.nan, int(T0) * 1000, 1)]
    for _ in range(3):
        tracker.log_metrics(run.run_id, batch)
    tracker.log_metrics(run.run_id, points(1200))  # partly new
    assert [point.step for point in tracker.history(run.run_id, "train/loss")] == list(
        range(1, 1201)
    )
    assert len(tracker.history(run.run_id, "train/nan")) == 1


def test_a_changed_param_becomes_a_tag(tracker: MlflowRuns, run: RunRecord) -> None:
    tracker.start_attempt(run.run_id, started(**{f"p{i}": str(i) for i in range(250)}))
    tracker.close_run(run.run_id, ended("KILLED"))
    assert tracker.find_run(run.run_id).status == "KILLED"
    tracker.start_attempt(
        run.run_id, started(2, p3="changed", late="x", **{f"p{i}": str(i) for i in range(3)})
    )
    record = tracker.find_run(run.run_id)
    assert record.params["p3"] == "3"
    assert record.params["late"] == "x"
    assert record.tags["rankzero.param.p3"] == "changed"
    assert {key for key in record.tags if key.startswith("rankzero.param.")} == {
        "rankzero.param.p3"
    }
    assert (record.tags["rankzero.attempt"], record.status) == ("2", "RUNNING")
    tracker.set_tags(run.run_id, {"rankzero.error": "of the second attempt"})
    for _ in range(2):
        tracker.start_attempt(run.run_id, started(3, p3="3"))
    after = tracker.find_run(run.run_id).tags
    assert after["rankzero.param.p3"] == "3" and "rankzero.error" not in after
    assert record.tags["host"] == "here"


def test_a_start_that_is_sent_again_keeps_the_words_of_users(
    tracker: MlflowRuns, run: RunRecord
) -> None:
    note = "mlflow.note.content"
    begun = RunStarted(T0, {}, {"team": "vision", note: "Mine.", "mlflow.user": "ann"}, 1)
    tracker.start_attempt(run.run_id, begun)
    tracker.set_tags(run.run_id, {"team": "speech", note: "Mine, edited.", "mlflow.user": "bob"})
    tracker.start_attempt(run.run_id, begun)
    tags = tracker.find_run(run.run_id).tags
    assert (tags["team"], tags[note], tags["mlflow.user"]) == ("speech", "Mine, edited.", "ann")
    later = RunStarted(T0, {}, {"team": "language", note: "Mine."}, 2)
    tracker.start_attempt(run.run_id, later)
    tags = tracker.find_run(run.run_id).tags
    assert (tags["team"], tags[note]) == ("language", "Mine, edited.")


def test_a_run_has_few_tags_of_ours(tracker: MlflowRuns, run: RunRecord) -> None:
    names = ("host", "python", "package.torch", "gpu", "dirty", "experiment_file")
    environment = {f"rankzero.{name}": "x" for name in names} | {"team": "vision"}
    tracker.start_attempt(run.run_id, RunStarted(T0, {"goal.metric": "val/loss"}, environment, 1))
    tags = tracker.find_run(run.run_id).tags
    assert {key for key in tags if not key.startswith("mlflow.")} == {
        "rankzero.attempt",
        "rankzero.claim",
        "rankzero.dirty",
        "rankzero.experiment_file",
        "rankzero.uuid",
        "team",
    }
    assert tags["rankzero.claim"] == f"{T0!r} x"


def test_hostile_params_and_tags_are_made_legal(tracker: MlflowRuns, run: RunRecord) -> None:
    nasty = {
        "a(b)=%": "x" * 10_000,
        "empty": "",
        "zero\x00byte": "\x00",
        "": "no name",
        "ünï": "🙂",
    }
    tracker.start_attempt(run.run_id, RunStarted(T0, nasty, nasty, 1))
    record = tracker.find_run(run.run_id)
    assert len(record.params["a_b___"]) == 6000
    assert record.params["ünï"] == "🙂"
    assert len(record.tags["a_b___"]) == 8000


def test_the_end_sets_status_and_results(tracker: MlflowRuns, run: RunRecord) -> None:
    tracker.set_tags(run.run_id, {"rankzero.best": "0.75"})
    tracker.log_metrics(
        run.run_id, [MetricPoint("whole_run/samples_per_second", 123.0, int(T0) * 1000, 0)]
    )
    tracker.close_run(run.run_id, ended("FINISHED"))
    record = tracker.find_run(run.run_id)
    assert (record.status, record.tags["rankzero.best"]) == ("FINISHED", "0.75")
    assert record.metrics["whole_run/samples_per_second"] == 123.0


def test_the_description_is_read_as_it_was_written(tracker: MlflowRuns, run: RunRecord) -> None:
    assert tracker.description(run.run_id) == ""
    page = "# A run\n\n- lines, ünïcode and trailing space \n\n"
    tracker.set_tags(run.run_id, {"mlflow.note.content": page})
    assert tracker.description(run.run_id) == page


def test_artifacts_are_uploaded_and_downloaded(
    tracker: MlflowRuns, run: RunRecord, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("lr: 1")
    tracker.log_artifact(run.run_id, tmp_path / "config.yaml")
    tracker.log_artifact(run.run_id, tmp_path / "config.yaml", "sub/folder")
    (tmp_path / "back").mkdir()
    assert (
        tracker.download_artifact(run.run_id, "config.yaml", tmp_path / "back").read_text()
        == "lr: 1"
    )
    assert (
        tracker.download_artifact(
            run.run_id, "sub/folder/config.yaml", tmp_path / "back"
        ).read_text()
        == "lr: 1"
    )
    with pytest.raises(TrackingError, match="no artifact"):
        tracker.download_artifact(run.run_id, "nothing.txt", tmp_path / "back")


def test_a_checkpoint_is_uploaded_and_downloaded(
    tracker: MlflowRuns, run: RunRecord, folder: RunFolder, tmp_path: Path
) -> None:
    event = saved(folder, 50)
    tracker.log_metrics(run.run_id, link(event)(None))
    model_id = tracker.models.save_checkpoint(run, event, folder.path / event.path, link(event))
    [checkpoint] = tracker.models.list_checkpoints(run)
    assert checkpoint[:4] == (50, model_id, "READY", True)
    back = tracker.models.download_checkpoint(model_id, tmp_path / "back")
    assert (back / "state.pt").read_bytes() == bytes(1000)
    assert (back / "ranks" / "0.json").read_text() == "{}"
    model = tracker._client.get_logged_model(model_id)
    assert {metric.key: metric.value for metric in model.metrics} == event.metrics
    assert len(tracker.history(run.run_id, "val/accuracy")) == 1
    outputs = tracker._client.get_run(run.run_id).outputs.model_outputs
    assert [(output.model_id, output.step) for output in outputs] == [(model_id, 50)]
    best = tracker.models.log_model(run, folder.path / event.path, "best_model", event.step, {})
    found = tracker._client.get_logged_model(best).metrics
    assert {metric.key: metric.value for metric in found} == event.metrics
    assert len(tracker.history(run.run_id, "val/accuracy")) == 1


def test_a_nan_of_the_best_checkpoint_gives_the_run_no_zero(
    tracker: MlflowRuns, run: RunRecord, folder: RunFolder
) -> None:
    event = dataclasses.replace(saved(folder, 50), metrics={"auroc": math.nan, "loss": 0.0})
    tracker.models.save_checkpoint(run, event, folder.path / event.path, link(event))
    best = tracker.models.log_model(run, folder.path / event.path, "best_model", event.step, {})
    assert [one.key for one in tracker._client.get_logged_model(best).metrics] == ["loss"]
    assert [str(one.value) for one in tracker.history(run.run_id, "auroc")] == ["nan"]


def test_saving_again_uploads_nothing_and_links_once(
    tracker: MlflowRuns, run: RunRecord, folder: RunFolder
) -> None:
    event = saved(folder, 50)
    first = tracker.models.save_checkpoint(run, event, folder.path / event.path, link(event))
    assert (
        tracker.models.save_checkpoint(run, event, folder.path / event.path, link(event)) == first
    )
    assert len(tracker._client.get_run(run.run_id).outputs.model_outputs) == 1


def test_an_interrupted_upload_is_replaced(
    tracker: MlflowRuns, run: RunRecord, folder: RunFolder
) -> None:
    event = saved(folder, 50)

    def die(model_id: str) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tracker.models.save_checkpoint(run, event, folder.path / event.path, die)
    assert [one.status for one in tracker.models.list_checkpoints(run)] == ["PENDING"]
    tracker.models.save_checkpoint(run, event, folder.path / event.path, link(event))
    assert [one.status for one in tracker.models.list_checkpoints(run)] == ["READY"]


def test_a_step_saved_again_replaces_the_old_checkpoint(
    tracker: MlflowRuns, run: RunRecord, folder: RunFolder
) -> None:
    event = saved(folder, 50)
    old = tracker.models.save_checkpoint(run, event, folder.path / event.path, link(event))
    later = CheckpointSaved(T0 + 1000, 50, event.path, False, event.metrics)
    new = tracker.models.save_checkpoint(run, later, folder.path / event.path, link(event))
    assert [one.model_id for one in tracker.models.list_checkpoints(run)] == [new] != [old]


def test_one_checkpoint_is_the_best(tracker: MlflowRuns, run: RunRecord, folder: RunFolder) -> None:
    for step in (10, 20):
        event = saved(folder, step)
        tracker.models.save_checkpoint(run, event, folder.path / event.path, link(event))
    assert [(one.step, one.best) for one in tracker.models.list_checkpoints(run)] == [
        (10, False),
        (20, True),
    ]


def test_deleting_a_checkpoint_deletes_its_bytes(
    tracker: MlflowRuns,
    run: RunRecord,
    folder: RunFolder,
    uri: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    stored = (
        tmp_path / "artifacts"
        if uri.startswith("sqlite")
        else request.getfixturevalue("server").root / "served"
    )
    before = bytes_in(stored)
    for step in (10, 20):
        event = saved(folder, step, size=50_000)
        tracker.models.save_checkpoint(run, event, folder.path / event.path, link(event))
    assert bytes_in(stored) == before + 100_000
    tracker.models.delete_checkpoints(run, 10)
    tracker.models.delete_checkpoints(run, 10)  # a replay
    assert bytes_in(stored) == before + 50_000
    assert [one.step for one in tracker.models.list_checkpoints(run)] == [20]


def test_a_folder_deleted_during_its_upload_leaves_nothing(
    tracker: MlflowRuns, run: RunRecord, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = saved(folder, 50)
    upload = _ArtifactLocation.upload_folder

    def upload_and_lose(location: Any, path: Path) -> None:
        upload(location, path)
        (path / "state.pt").unlink()

    monkeypatch.setattr(_ArtifactLocation, "upload_folder", upload_and_lose)
    with pytest.raises(FileNotFoundError):
        tracker.models.save_checkpoint(run, event, folder.path / event.path, link(event))
    with pytest.raises(FileNotFoundError):
        tracker.models.save_checkpoint(run, event, folder.path / "nowhere", link(event))
    assert tracker.models.list_checkpoints(run) == []


def test_a_refused_upload_leaves_nothing(
    tracker: MlflowRuns, run: RunRecord, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = saved(folder, 50)
    refuse = Mock(side_effect=NeverAccepted("413"))
    monkeypatch.setattr(_ArtifactLocation, "upload_folder", refuse)
    with pytest.raises(NeverAccepted):
        tracker.models.save_checkpoint(run, event, folder.path / event.path, link(event))
    with pytest.raises(NeverAccepted):
        tracker.models.log_model(run, folder.path / event.path, "best_model", event.step, {})
    assert tracker.models.of_run(run) == []


def test_a_checkpoint_on_the_disk_of_the_store_is_linked_not_copied(
    sqlite: str, tmp_path: Path
) -> None:
    tracker, folder = MlflowRuns(sqlite), make_folder(tmp_path, sqlite)
    event = saved(folder, 50)
    tracker.models.save_checkpoint(
        tracker.open_run(folder.identity, T0), event, folder.path / event.path, link(event)
    )
    assert (folder.path / event.path / "state.pt").stat().st_nlink == 2


def test_a_deleted_run_raises_run_gone(tracker: MlflowRuns, run: RunRecord) -> None:
    tracker.require_run(run.run_id)
    tracker._client.delete_run(run.run_id)
    with pytest.raises(RunGone):
        tracker.require_run(run.run_id)
    with pytest.raises(Exception, match="active") as raised:
        tracker.log_metrics(run.run_id, points(1))
    assert refusal(raised.value)  # type: ignore[arg-type]


def test_an_illegal_name_is_a_refusal(tracker: MlflowRuns, run: RunRecord) -> None:
    with pytest.raises(Exception, match=r"(?i)invalid") as raised:
        tracker.log_metrics(run.run_id, [MetricPoint("a(b)", 1.0, 0, 0)])
    assert refusal(raised.value)  # type: ignore[arg-type]


def test_a_dead_server_is_not_a_refusal() -> None:
    with pytest.raises(Exception, match="failed with exception") as raised:
        MlflowRuns("http://127.0.0.1:9").find_run("anything")
    assert refusal(raised.value) is None  # type: ignore[arg-type]


def test_a_server_that_fails_once_is_not_a_missing_run(
    tracker: MlflowRuns, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise MlflowException("502 Bad Gateway")

    with monkeypatch.context() as patched:
        patched.setattr(tracker._client, "get_run", fail)
        with pytest.raises(MlflowException, match="502"):
            tracker.find_run(run.run_id)
    with pytest.raises(NoSuchRun):
        tracker.find_run("no/such run")


def test_the_error_for_a_deleted_experiment_names_the_command(
    tracker: MlflowRuns, tmp_path: Path, uri: str
) -> None:
    identity = make_folder(tmp_path, uri).identity
    gone = Identity(**{**vars(identity), "experiment": f"gone-{identity.uuid}"})
    tracker._client.delete_experiment(tracker.open_run(gone, T0).experiment_id)
    other = Identity(**{**vars(gone), "uuid": "another"})
    with pytest.raises(TrackingError) as raised:
        tracker.open_run(other, T0)
    assert f"MLFLOW_TRACKING_URI={shlex.quote(uri)} mlflow exp" in str(raised.value)


def test_an_unknown_run_is_an_error(tracker: MlflowRuns) -> None:
    with pytest.raises(TrackingError, match="no run is called"):
        tracker.find_run("it's nobody")


def test_a_run_is_found_in_any_of_many_experiments(
    tracker: MlflowRuns, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker._client.create_experiment(f"newer than {run.run_id}")
    # MLflow's own pages have a thousand.
    pages = functools.partial(tracker._client.search_experiments, max_results=1)
    monkeypatch.setattr(tracker._client, "search_experiments", pages)
    assert tracker.find_run(run.name).run_id == run.run_id
    assert run.run_id in tracker.ids_named(run.name)
    tracker.deletion.delete(run.run_id)
    assert run.run_id in tracker.deletion.deleted()


def test_nothing_is_left_in_the_current_directory(
    sqlite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    tracker, folder = MlflowRuns(sqlite), make_folder(tmp_path, sqlite)
    run = tracker.open_run(folder.identity, T0)
    tracker.log_artifact(run.run_id, folder.path / "run.json")
    assert list(here.iterdir()) == []
    assert list((tmp_path / "artifacts").rglob("run.json"))


def test_postgres_accepts_a_batch_again(postgres: str, tmp_path: Path) -> None:
    tracker, folder = (
        MlflowRuns(postgres),
        make_folder(tmp_path, postgres, artifact_root=str(tmp_path / "artifacts")),
    )
    assert "tcp_user_timeout" in str(tracker._client.tracking_uri)
    run = tracker.open_run(folder.identity, T0)
    batch = [*points(1000), MetricPoint("train/nan", math.nan, int(T0) * 1000, 1)]
    for _ in range(3):
        tracker.log_metrics(run.run_id, batch)
    tracker.log_metrics(run.run_id, points(1200))
    tracker.start_attempt(run.run_id, RunStarted(T0, {"zero\x00byte": "\x00", "ünï": "🙂"}, {}, 1))
    event = saved(folder, 50)
    for _ in range(2):
        tracker.models.save_checkpoint(run, event, folder.path / event.path, link(event))
    assert [point.step for point in tracker.history(run.run_id, "train/loss")] == list(
        range(1, 1201)
    )
    assert len(tracker.history(run.run_id, "train/nan")) == 1
    assert [one.status for one in tracker.models.list_checkpoints(run)] == ["READY"]
    assert tracker.open_run(folder.identity, T0).marks["train/loss"] == 1200


FIRST = """
import sys
from pathlib import Path
from rankzero.mlflow_store.client import MlflowRuns
print("ready", flush=True)
sys.stdin.readline()
MlflowRuns(sys.argv[1])
"""

DYING = """
import os
import sys
from sqlalchemy import Engine, event
from rankzero.mlflow_store.client import MlflowRuns

@event.listens_for(Engine, "after_cursor_execute")
def die(connection, cursor, statement, *_):
    if "INSERT INTO experiments" in statement:
        os._exit(9)

MlflowRuns(sys.argv[1])
"""


def beginner(uri: str) -> subprocess.Popen[str]:
    """Start a process that is ready to be the first in a store."""
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST, uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
def test_processes_that_create_a_store_at_once_share_it(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    processes = [beginner(uri) for _ in range(2)]
    for process in processes:
        begin(process)
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_process_that_dies_while_creating_tables_leaves_a_usable_store(
    tmp_path: Path,
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    died = subprocess.run([sys.executable, "-c", DYING, uri], check=False, timeout=60)
    assert died.returncode == 9
    assert MlflowRuns(uri)._client.search_experiments()
    assert not list(tmp_path.glob(".setup-*"))


def test_a_replaced_best_model_that_is_registered_in_any_way_stays(
    tracker: MlflowRuns, run: RunRecord, folder: RunFolder
) -> None:
    def log(step: int) -> str:
        tags = {"rankzero.step": str(step), "rankzero.model": "best"}
        return tracker.models.log_model(run, folder.path, "best_model", step, tags)

    client = tracker._client
    # As MLflow's page registers a model.
    button = log(1)
    client.create_registered_model("button")
    location = client.get_logged_model(button).artifact_location
    client.create_model_version("button", location, run.run_id, model_id=button)
    # As a model is promoted, and the version before is deleted.
    copied = log(2)
    tracker.models.register(run, copied, "staging")
    client.copy_model_version("models:/staging/1", "production")
    client.delete_model_version("staging", "1")
    other = log(3)
    for model in (button, copied, other):
        tracker.models.retire(model)
    tags = {one.model_id: one.tags["rankzero.model"] for one in tracker.models.of_run(run)}
    assert tags == {button: "former", copied: "former"}
    tracker.models.retire(other)

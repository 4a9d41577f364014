"""A store that commit 80008b7 made still lists, reports, resumes, syncs and searches.

The tests use the commands and the public functions only: the modules below them may have any name.
`make_store.py` describes the runs of the archive and makes it.

A store keeps absolute paths of its database, of its artifacts and of the experiment's file. If
somebody only moves a store, ``runs`` and ``report`` work, ``resume`` asks for ``--experiment``, and
``sync`` writes into a database at the old place. So `unpack` replaces the paths.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import re
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import rankzero
from support.commands import warm_server

ARCHIVE = Path(__file__).with_name("mlruns-80008b7.tar.xz")
SECONDS = 200.0
STEPS = 64  # of a whole run of exact.py
# A store keeps paths here that the commands use; journals, tags and reports only quote theirs.
PATHS_IN_MLFLOW = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
)
NEW_SETTINGS = (
    "log_model=False, pictures=False",
    "mlflow=Train.MLflow(log_model=False, log_pictures=False)",
)
PATHS_IN_STUDIES = (("study_user_attributes", "value_json"),)


@dataclasses.dataclass(frozen=True)
class OldStore:
    """An unpacked store, with commands that run in its folder."""

    folder: Path
    expected: dict[str, Any]
    """`make_store.py` read this from the store without the package."""

    @property
    def mlruns(self) -> Path:
        return self.folder / "mlruns"

    def command(self, *words: str) -> tuple[int, str]:
        """Run ``rankzero``; return the exit code and all that it printed."""
        other = ("MLFLOW_", "RANKZERO_")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(other)}
        environ = {
            **kept,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "RANKZERO_DELIVERY_GRACE_SECONDS": "120",
        }
        process = warm_server().start(words, self.folder, environ)
        output, _ = process.communicate(timeout=SECONDS)
        return process.returncode, output

    def run(self, name: str) -> Any:
        return rankzero.run(name, dir=self.mlruns)

    def losses(self, name: str) -> dict[int, float]:
        """Return the train/loss that the old commit wrote into the journal, by step."""
        return {int(step): loss for step, loss in self.expected["losses"][name].items()}

    def mlflow(self, query: str, *values: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self.mlruns / "mlflow.db")) as database:
            return database.execute(query, values).fetchall()

    def mlflow_losses(self, name: str) -> list[tuple[int, float]]:
        """Return the steps and values of train/loss in MLflow, duplicates included."""
        return self.mlflow(
            "SELECT step, value FROM metrics JOIN runs USING (run_uuid) "
            "WHERE name = ? AND key = 'train/loss' ORDER BY step",
            name,
        )

    def mlflow_status(self, name: str) -> str:
        ((status,),) = self.mlflow("SELECT status FROM runs WHERE name = ?", name)
        return str(status)

    def status(self) -> dict[str, str]:
        """Return what ``rankzero runs`` shows as each run's status."""
        return {row["name"]: row["status"] for row in self.listed()}

    def listed(self, *filters: str) -> list[dict[str, Any]]:
        code, output = self.command("runs", "--json", *filters)
        assert code == 0, output
        return list(json.loads(output[output.index("[{") :]))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OldStore]:
    """A store of the test's own."""
    with unpacked(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OldStore]:
    """One store for all tests that only read it."""
    with unpacked(tmp_path_factory.mktemp("old")) as found:
        yield found


@contextlib.contextmanager
def unpacked(folder: Path) -> Iterator[OldStore]:
    unpack(folder)
    try:
        yield OldStore(folder, json.loads((folder / "expected.json").read_text()))
    finally:
        end_processes(folder)


def unpack(folder: Path) -> None:
    """Unpack the archive, and replace the old folder by `folder` in all paths that commands use."""
    with tarfile.open(ARCHIVE) as archive:
        # Debian's Python 3.11.2 has no filters. The archive is our own.
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **safely)  # noqa: S202
    old = json.loads((folder / "expected.json").read_text())["base"]
    # As a user would after the error that names the new settings. RankZero itself wrote the rest.
    experiment = folder / "exact.py"
    experiment.write_text(experiment.read_text().replace(*NEW_SETTINGS))
    for path in folder.glob("mlruns/runs/*/run.json"):
        modified = path.stat().st_mtime
        path.write_text(path.read_text().replace(old, str(folder)))
        os.utime(path, (modified, modified))
    for name, columns in (("mlflow.db", PATHS_IN_MLFLOW), ("studies.db", PATHS_IN_STUDIES)):
        with contextlib.closing(sqlite3.connect(folder / "mlruns" / name)) as database, database:
            for table, column in columns:
                change = f"UPDATE {table} SET {column} = replace({column}, ?, ?)"  # noqa: S608
                database.execute(change, (old, str(folder)))


def end_processes(folder: Path) -> None:
    """End the couriers that still draw figures when the test has seen enough."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.pid != os.getpid():
                process.kill()


def test_no_text_of_the_archive_names_the_machine_that_made_it(shared: OldStore) -> None:
    found = set[bytes]()
    for path in shared.folder.rglob("*"):
        if path.is_file() and path.suffix != ".db":
            found |= set(re.findall(rb"(?:/work|/home|/root|/Users)/[\w./-]*", path.read_bytes()))
    assert not found


def test_runs_lists_every_run_with_its_status(store: OldStore) -> None:
    ends = {
        "finished": "FINISHED",
        "undelivered": "FINISHED",
        "own-loop": "FINISHED",
        "done": "FINISHED",
        "stopped": "KILLED",
        "interrupted": "KILLED",
        "failed": "FAILED",
        "died": "FAILED",
    }
    assert store.status() == ends
    assert {row["name"] for row in store.listed() if row["undelivered"]} >= {"undelivered"}
    good = {row["name"] for row in store.listed("val/accuracy>0.97")} - {"died"}
    assert good == {"finished", "undelivered"}
    assert {row["name"] for row in store.listed("step_seconds=0.05")} == {"stopped"}
    table = rankzero.runs("lr=0.0625", sort="val/accuracy", dir=store.mlruns)
    assert {"finished", "stopped", "failed"} <= set(table["name"])
    assert "own-loop" not in set(table["name"])
    assert set(rankzero.runs(all=True, dir=store.mlruns)["name"]) > {
        *ends,
        "done-000",
        "interrupted-001",
    }


def test_a_run_that_was_killed_gets_its_end(store: OldStore) -> None:
    assert store.run("died").status == "DIED"
    code, output = store.command("runs")
    assert code == 0 and "old-store" in output, output  # the machine that it was last seen on
    assert store.run("died").status == "FAILED"


def test_report_of_runs(shared: OldStore) -> None:
    code, output = shared.command("report", "finished")
    assert code == 0 and "step 40" in output and f"{STEPS} of {STEPS}" in output, output
    code, output = shared.command("report", "stopped")
    assert code == 0 and "rankzero resume stopped" in output and "Ctrl-C" in output, output
    code, output = shared.command("report", "failed")
    assert code == 0 and "KeyError" in output, output
    code, output = shared.command("report", "finished", "stopped")
    assert code == 0 and "step_seconds" in output and "0.05" in output, output
    code, output = shared.command("report", "own-loop")
    assert code == 0 and "FINISHED" in output and "0.25" in output, output


def test_report_of_a_study_gives_the_same_verdict(shared: OldStore) -> None:
    code, output = shared.command("report", "done")
    assert code == 0, output
    numbers = set(re.findall(r"\d+(?:\.\d+)?", shared.expected["verdict"]))
    assert len(numbers) > 5 and numbers <= set(re.findall(r"\d+(?:\.\d+)?", output)), output
    code, output = shared.command("report", "interrupted")
    assert code == 0 and "the same search command" in output, output


def test_logs(shared: OldStore) -> None:
    assert shared.command("logs", "finished") == (0, "256 samples to train, 64 to validate\n")


def test_export(shared: OldStore, tmp_path: Path) -> None:
    for name in ("finished", "own-loop"):
        code, output = shared.command("export", name, "--to", str(tmp_path / name))
        assert code == 0, output
        with (tmp_path / name / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["train/loss"]]
        assert {int(row["step"]): float(row["train/loss"]) for row in rows} == shared.losses(name)
    summary = json.loads((tmp_path / "finished" / "run.json").read_text())
    assert (summary["status"], summary["best"]) == ("FINISHED", 1.0)
    assert summary["params"]["lr"] == "0.0625"


def test_a_run_in_python(shared: OldStore) -> None:
    finished = shared.run("finished")
    assert [(one.step, one.best) for one in finished.checkpoints] == [(40, True), (STEPS, False)]
    assert history(finished) == shared.losses("finished") and finished.experiment().lr == 0.0625
    model = finished.model().eval()
    inputs, labels = finished.experiment().data()[1].tensors
    with torch.no_grad():
        right = (model(inputs).squeeze(1) > 0) == (labels > 0)
    assert bool(right.all())  # its val/accuracy was 1
    own = shared.run("own-loop")
    assert own.status == "FINISHED" and own.params["lr"] == 0.25
    assert history(own) == shared.losses("own-loop")
    (checkpoint,) = own.checkpoints
    assert checkpoint.step == 10 and (checkpoint.path / "manifest.json").exists()


@pytest.mark.timeout(300)
def test_a_stopped_run_resumes_and_computes_the_same_bits(store: OldStore) -> None:
    code, output = store.command("resume", "stopped")
    assert code == 0, output
    resumed, whole = store.run("stopped"), store.run("finished")
    assert resumed.status == "FINISHED" and resumed.best == 1.0
    assert max(store.losses("stopped")) < STEPS  # there was something left to do
    assert history(resumed) == store.losses("finished")
    assert store.mlflow_losses("stopped") == sorted(store.losses("finished").items())
    assert store.mlflow_status("stopped") == "FINISHED"
    states = [load_newest(run) for run in (resumed, whole)]
    assert_equal(*[state["model"] for state in states])
    assert_equal(*[state["optimizer"] for state in states])


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_stopped_run_resumes_from_mlflow_alone(store: OldStore) -> None:
    ((run_id,),) = store.mlflow("SELECT run_uuid FROM runs WHERE name = 'stopped'")
    shutil.rmtree(store.mlruns / "runs" / "stopped")
    code, output = store.command("resume", run_id, "--experiment", "exact.py", "step_seconds=0")
    assert code == 0, output
    assert store.mlflow_losses("stopped") == sorted(store.losses("finished").items())
    resumed, whole = load_newest(store.run("stopped")), load_newest(store.run("finished"))
    assert_equal(resumed["model"], whole["model"])


@pytest.mark.timeout(300)
def test_sync_delivers_what_was_left(store: OldStore) -> None:
    names = ("undelivered", "died")
    for name in names:
        delivered = len(store.mlflow_losses(name))
        assert delivered == store.expected["delivered"][name] < len(store.losses(name))
    code, output = store.command("sync")
    assert code == 0, output
    for name in names:
        assert store.mlflow_losses(name) == sorted(store.losses(name).items())
    assert (store.mlflow_status("undelivered"), store.mlflow_status("died")) == (
        "FINISHED",
        "FAILED",
    )
    assert not any(row["undelivered"] for row in store.listed())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_search_command_finishes_an_interrupted_study(store: OldStore) -> None:
    probes = sorted(store.mlruns.glob("probes/*.jsonl"))
    before = (store.mlruns / "runs/interrupted-000/events.jsonl").read_bytes()
    code, output = store.command("search", *store.expected["search"], "--study", "interrupted")
    assert code == 0, output
    assert store.status()["interrupted"] == store.mlflow_status("interrupted") == "FINISHED"
    assert not re.search(r"^trial +[01] ", output, re.M) and re.search(r"^trial +2 ", output, re.M)
    assert (store.mlruns / "runs/interrupted-000/events.jsonl").read_bytes() == before
    assert not re.search(r" fail ", output), output
    # The study has its ranges, so the search measures no speeds again.
    assert probes == sorted(store.mlruns.glob("probes/*.jsonl"))
    code, report = store.command("report", "interrupted")
    assert code == 0 and "the same search command" not in report, report


def history(run: Any) -> dict[int, float]:
    table = run.history("train/loss")
    return dict(zip(map(int, table["step"]), map(float, table["train/loss"]), strict=True))


def load_newest(run: Any) -> dict[str, Any]:
    """Return what the newest checkpoint of a run holds; it must be the last step's."""
    newest = run.checkpoints[-1]
    assert newest.step == STEPS
    return dict(torch.load(newest.path / "state.pt", weights_only=True))


def assert_equal(one: Any, other: Any) -> None:
    """Compare nested dicts, lists and tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other

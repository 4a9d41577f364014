"""Runs of somebody else: nothing in them runs code, or reads or writes outside their folder."""

from __future__ import annotations

import argparse
import http.server
import json
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.express import scatter

from rankzero.catalog import lookup
from rankzero.cli.commands import resume
from rankzero.cli.commands import runs as runs_command
from rankzero.cli.commands import sync as sync_command
from rankzero.cli.main import main
from rankzero.errors import UserError
from rankzero.events import CheckpointSaved
from rankzero.housekeeping import download
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.client.experiments import folder_for
from rankzero.reporting import html_page, html_report
from rankzero.run_store import names, provenance, run_locks, symlinks
from rankzero.run_store.folder import Identity, RunFolder, write_atomically
from rankzero.run_store.journal import Journal
from rankzero.tracking import delivery_status, sync
from rankzero.training.checkpoints import best_model
from support.fuzz import thorough
from support.memory_store import MemoryStore, delivered
from support.runs import T0, append, ended, make_folder, saved, settle, started, steps

EVIL = [
    "../x",
    "a/b",
    ".",
    "..",
    "",
    "x" * 10_000,
    "a\nb",
    "a\x00b",
    "/etc/x",
    "~",
    "-rf",
    ".hidden",
    "a\\b",
    "\ud800",
    "a b",
]


@pytest.mark.parametrize("name", EVIL)
def test_a_run_name_that_is_not_plain_is_refused(name: str, tmp_path: Path) -> None:
    identity = Identity(name, "u", "tests", "sqlite:///x.db")
    for make in (RunFolder.create, RunFolder.open_or_create):
        with pytest.raises(UserError, match="a run's name may have"):
            make(tmp_path / "runs", identity)
    assert lookup.find(tmp_path / "runs", name) is None
    with pytest.raises(UserError, match="no run is called"):
        lookup.require(tmp_path / "runs", name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("link", ["mlruns", "mlruns/runs", "mlruns/runs/a-run"])
def test_a_run_below_a_link_whose_target_is_gone_is_refused(link: str, tmp_path: Path) -> None:
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / "unmounted")
    identity = Identity("a-run", "u", "tests", "sqlite:///x.db")
    # `rankzero.track` would take FileExistsError for a taken name, and draw names for ever.
    for make in (RunFolder.create, RunFolder.open_or_create):
        with pytest.raises(UserError, match=f"{link} is no folder, or a link to one that is gone"):
            make(tmp_path / "mlruns" / "runs", identity)


@thorough
@given(st.text(max_size=300) | st.sampled_from(EVIL))
def test_any_text_makes_a_name_that_is_one_folder(text: str) -> None:
    name = names.made_plain(text)
    assert names.is_plain(name) and names.checked_run(name) == name
    assert Path("runs", name).parent == Path("runs")


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\x00b", "x" * 501, "\ud800"])
def test_an_experiment_name_that_cannot_be_printed_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="an experiment's name"):
        RunFolder.create(tmp_path / "runs", Identity("fine", "u", name, "sqlite:///x.db"))
    assert list(tmp_path.iterdir()) == []


@thorough
@given(
    st.text(min_size=1, max_size=300)
    | st.sampled_from(["..", ".", "../..", "/etc", "x" * 500, "ü" * 500])
)
def test_the_artifacts_of_an_experiment_are_in_one_folder(name: str) -> None:
    try:
        names.check_experiment(name)
    except UserError:
        return
    folder = folder_for(name)
    assert Path("/a", folder).resolve().parent == Path("/a") and len(folder) <= 200


@pytest.mark.parametrize("name", ["..", "../../up", "%2E%2E", "..%2Fup", "a/b", "."])
def test_an_experiment_of_any_name_stays_in_the_store(
    name: str, sqlite: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, sqlite, experiment=name)
    tracker = MlflowRuns(sqlite)
    run = tracker.open_run(folder.identity, T0)
    tracker.log_artifact(run.run_id, folder.path / "run.json")
    [place] = tmp_path.parent.rglob(f"{run.run_id}/artifacts/run.json")
    assert (
        place.relative_to(tmp_path).parts[0] == "artifacts"
        and len(place.relative_to(tmp_path).parts) == 5
    )


def test_no_report_or_export_has_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(html_page.page("not yours", [scatter([1], [2])]))
    folder = make_folder(tmp_path / "store")
    append(folder, started(**{"search.sampler": "tpe"}), steps(1, 3), ended())
    links = ("a.png", "provenance/diff.patch", "provenance/packages.txt", "search.html")
    for path in (folder.artifacts / name for name in links):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(tmp_path / "secret")
    (folder.artifacts / "b.png").write_bytes(b"mine")
    assert html_report._charts_of_search(folder) == []
    page = "".join(html_report._pictures(folder, []))
    assert 'alt="b"' in page and 'alt="a"' not in page
    assert provenance.read_artifacts(folder.artifacts) == ({}, "")
    words = ["export", folder.path.name, "--to", str(tmp_path / "to")]
    assert main([*words, "--dir", str(tmp_path / "store")]) == 0
    assert (tmp_path / "to/figures/b.png").exists()
    assert not (tmp_path / "to/figures/a.png").exists()


def test_uploads_that_lead_out_of_the_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not yours")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("not yours")
    folder = make_folder(tmp_path)
    for place in (folder.artifacts, folder.failures, folder.checkpoints / "step_1"):
        place.mkdir(parents=True)
    (folder.artifacts / "fine.txt").write_text("mine")
    (folder.artifacts / "link.txt").symlink_to(tmp_path / "secret")
    (folder.artifacts / "links").symlink_to(tmp_path / "private")
    (folder.failures / "rank_0.json").symlink_to(tmp_path / "secret")
    (folder.checkpoints / "step_1" / "state.pt").symlink_to(tmp_path / "secret")
    (folder.checkpoints / "step_2").symlink_to(tmp_path / "private")
    paths = [
        "../../private",
        str(tmp_path / "private"),
        "checkpoints/step_1",
        "checkpoints/step_2",
        "checkpoints",
        ".",
    ]
    planted = [CheckpointSaved(T0 + n, n, path, False, {}) for n, path in enumerate(paths)]
    append(folder, started(), *planted, saved(folder, 50), ended())
    tracker = MemoryStore()
    deliverer = delivered(folder, tracker)
    assert list(tracker.checkpoints) == [50] and tracker.artifacts == {"fine.txt": "mine"}
    assert deliverer.state.problems.rejected >= len(planted) + 2
    assert "leads out of the run's folder" in tracker.tags["rankzero.rejected"]


@pytest.fixture
def fetched(
    sqlite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[MlflowRuns, RunFolder, Path]:
    """Return a store, a run that only MLflow has, and the current folder."""
    made = make_folder(tmp_path / "other", sqlite)
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    tracker = MlflowRuns(sqlite)
    run = tracker.open_run(made.identity, T0)
    (made.path / "config.yaml").write_text("lr: 0.1\n")
    tracker.log_artifact(run.run_id, made.path / "config.yaml")
    return tracker, made, project


def test_a_run_of_any_name_in_mlflow_becomes_a_folder_among_the_runs(
    fetched: tuple[MlflowRuns, RunFolder, Path], sqlite: str
) -> None:
    tracker, made, project = fetched
    run_id = tracker.find_run(made.path.name).run_id
    runs = project / "mlruns" / "runs"
    for name in ("../../x", "/etc/x", "..", "a/b", "n" * 400, made.path.name):
        tracker.set_tags(run_id, {"mlflow.runName": name})
        folder = download.run_folder(runs, sqlite, run_id)
        assert folder.path.parent == runs and folder.config.read_text() == "lr: 0.1\n"
    assert {path.name for path in project.iterdir()} == {"mlruns"}


def test_a_run_in_mlflow_does_not_take_the_folder_of_another(
    fetched: tuple[MlflowRuns, RunFolder, Path], sqlite: str
) -> None:
    tracker, made, project = fetched
    runs = project / "mlruns" / "runs"
    mine = RunFolder.create(runs, Identity(made.path.name, "another", "tests", sqlite))
    mine.config.write_text("lr: 7\n")
    folder = download.run_folder(runs, sqlite, tracker.find_run(made.path.name).run_id)
    assert folder.path != mine.path and mine.config.read_text() == "lr: 7\n"


@pytest.mark.parametrize(
    "planted", ["/tmp/evil.py", "../evil.py", "mlruns/artifacts/evil.py", "a/../../evil.py"]
)
def test_code_that_mlflow_names_is_not_executed(
    fetched: tuple[MlflowRuns, RunFolder, Path], sqlite: str, planted: str
) -> None:
    tracker, made, project = fetched
    run_id = tracker.find_run(made.path.name).run_id
    tracker.set_tags(run_id, {"rankzero.experiment_file": planted})
    folder = download.run_folder(project / "mlruns" / "runs", sqlite, run_id)
    assert folder.identity.experiment_file is None
    tracker.set_tags(run_id, {"rankzero.experiment_file": "experiments/digits.py"})
    assert download.file_here("experiments/digits.py", project / "mlruns") == str(
        project / "experiments/digits.py"
    )


def test_code_that_came_with_a_run_is_not_executed(tmp_path: Path) -> None:
    evil = tmp_path / "runs" / "evil.py"
    folder = make_folder(tmp_path, experiment_file=str(evil))
    evil.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    with pytest.raises(UserError, match="is among the runs"):
        resume._experiment(folder, argparse.Namespace(dir=tmp_path, settings=[], experiment=None))
    assert not (tmp_path / "executed").exists()


def test_experiment_next_to_the_runs_is_the_projects_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with `rankzero train mine_here.py --dir .`.
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine_here.py"
    mine.write_text("import rankzero\nclass Mine(rankzero.Experiment):\n    lr: float = 0.1\n")
    folder = make_folder(tmp_path, experiment_file=str(mine))
    folder.config.write_text("lr: 0.5\n")
    assert resume.class_of(folder, tmp_path).__name__ == "Mine"
    assert vars(best_model.experiment_of(folder))["lr"] == 0.5
    assert download.file_here("mine_here.py", tmp_path) == str(mine)
    assert download.file_here("runs/other/mine_here.py", tmp_path) is None


def test_links_among_downloaded_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "config.yaml").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="not a plain file"):
        download.require_plain_files(tmp_path / "real")


@pytest.fixture
def lying_server() -> Iterator[str]:
    """Yield the URI of a server that lists artifacts with paths out of their folder."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urllib.parse.urlsplit(self.path)
            if "logged-models" in path.path:
                place = "mlflow-artifacts:/1/models/m-1/artifacts"
                info = {
                    "model_id": "m-1",
                    "experiment_id": "1",
                    "name": "x",
                    "status": 2,
                    "artifact_uri": place,
                }
                body = json.dumps({"model": {"info": info}})
            elif "mlflow-artifacts" in path.path and not path.path.endswith("planted"):
                files = [{"path": "../../../planted", "is_dir": False, "file_size": 4}]
                body = json.dumps({"files": files})
            else:
                body = "evil"
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def test_a_server_cannot_write_outside_of_the_checkpoint(lying_server: str, tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "c" / "checkpoint"
    with pytest.raises(Exception, match=r"(?i)invalid path|planted"):
        MlflowRuns(lying_server).models.download_checkpoint("m-1", target)
    assert not list(tmp_path.rglob("planted"))


LINKED = [
    "events.jsonl",
    "recorder.log",
    "recorder.lock",
    "recorder.json",
    "delivery.json",
    "children.txt",
    "config.yaml",
    "system-node_0.jsonl",
]


def planted_link(tmp_path: Path, name: str) -> tuple[RunFolder, Path]:
    """Return a dead run in which one file is a link out of it, and the link's target."""
    made, target = make_folder(tmp_path), tmp_path / "mine"
    target.write_text("# mine\n")
    made.failures.mkdir()
    (made.failures / "rank_0.json").write_text(
        json.dumps({"time": 9e9, "reason": "$(touch evil)", "error": ""})
    )
    if name != "events.jsonl":
        append(made, started())
    (made.path / name).unlink(missing_ok=True)
    (made.path / name).symlink_to(target)
    return made, target


@pytest.mark.parametrize("name", LINKED)
def test_nothing_is_written_through_a_link_in_a_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, target = planted_link(tmp_path, name)
    runs = folder.path.parent
    arguments = argparse.Namespace(
        dir=runs.parent, run=None, filters=[], all=True, json=False, sort=None, limit=None
    )
    assert sync_command.run(arguments) == 1
    output = capsys.readouterr().out
    assert f"skipped: {folder.path}" in output and "nothing else to deliver" in output
    assert runs_command.run(arguments) == 0 and name in capsys.readouterr().err
    for refused in (
        lambda: lookup.require(runs, folder.path.name),
        lambda: sync.deliver(folder),
        lambda: RunFolder.open_or_create(
            runs, Identity(folder.path.name, "u", "tests", "sqlite:///x.db")
        ),
    ):
        with pytest.raises(names.InvalidRunFolder, match=re.escape(repr(name))):
            refused()
    assert (
        target.read_text() == "# mine\n"
        and [path.name for path in tmp_path.iterdir()].count("evil") == 0
    )


@pytest.mark.parametrize("name", ["checkpoints", "artifacts", "logs", "failures", "pictures"])
def test_no_folder_of_a_run_may_be_a_link_out_of_it(name: str, tmp_path: Path) -> None:
    folder, target = make_folder(tmp_path), tmp_path / "mine"
    target.mkdir()
    (folder.path / name).symlink_to(target)
    with pytest.raises(names.InvalidRunFolder, match="Replace each link with the file"):
        lookup.require(folder.path.parent, folder.path.name)


def test_a_pipe_in_a_run_blocks_no_list(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    os.mkfifo(folder.events)
    told: list[str] = []
    assert lookup.listed(folder.path.parent, told.append) == [] and "events.jsonl" in told[0]


def test_other_files_of_a_user_may_be_of_any_kind(tmp_path: Path) -> None:
    """Such as a link to the best checkpoint, or a tool's socket."""
    folder = make_folder(tmp_path)
    saved(folder, 4)
    (folder.path / "best").symlink_to("checkpoints/step_4")
    os.mkfifo(folder.path / "control")
    assert lookup.require(folder.path.parent, folder.path.name) == folder
    assert [one.name for one in lookup.listed(folder.path.parent)] == [folder.path.name]


def test_a_link_made_during_the_training_does_not_end_the_run(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder.path / "data").symlink_to("/")
    assert folder.identity.name == folder.path.name, "an open run may finish"


def test_a_file_that_is_deleted_during_the_check_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path)
    monkeypatch.setattr(
        Path, "iterdir", lambda path: iter([path / "run.json", path / ".delivery.json.123"])
    )
    symlinks.refuse(folder.path)


def test_sync_fails_for_a_refused_folder_and_delivers_the_others(
    sqlite: str, tmp_path: Path
) -> None:
    planted_link(tmp_path, "recorder.log")
    whole = make_folder(tmp_path, sqlite)
    append(whole, started(), ended("FAILED"))
    assert sync_command.run(argparse.Namespace(dir=tmp_path, run=None)) == 1
    assert delivery_status.status(whole).done


def test_a_run_found_by_its_id_is_checked_too(tmp_path: Path) -> None:
    """Its summary was cached before the link was made."""
    folder = make_folder(tmp_path, mlflow_run_id="a" * 32)
    append(folder, started(), ended())
    settle(folder)
    assert lookup.find(folder.path.parent, "a" * 32) == folder
    before = folder.path.stat()
    (folder.path / "artifacts").symlink_to("/")
    assert lookup.find(folder.path.parent, "a" * 32) is None
    os.utime(folder.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(names.InvalidRunFolder, match="'artifacts'"):
        lookup.find(folder.path.parent, "a" * 32)


def test_the_folder_of_a_run_may_itself_be_a_link(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    moved = tmp_path / "another-disk"
    folder.path.rename(moved)
    folder.path.symlink_to(moved)
    assert lookup.require(folder.path.parent, folder.path.name).identity.name == folder.path.name


@pytest.mark.parametrize("write", [run_locks.acquire, lambda folder, _: Journal(folder.events)])
def test_files_of_a_run_are_not_opened_through_links(
    write: Callable[[RunFolder, int], object], tmp_path: Path
) -> None:
    """Somebody may plant a link after the folder was checked."""
    folder = make_folder(tmp_path)
    for name in ("events.jsonl", "recorder.lock"):
        (folder.path / name).symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="symbolic links"):
        write(folder, 0)
    assert not (tmp_path / "new").exists()


def test_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    folder, target = make_folder(tmp_path), tmp_path / "mine"
    target.write_text("# mine\n")
    place = folder.artifacts / "provenance"
    place.mkdir(parents=True)
    for name in ("environment.json", "packages.txt"):
        (place / name).symlink_to(target)
    provenance.write_artifacts(provenance.collect(tmp_path, ["x"], {}), folder.artifacts)
    provenance.write_packages(folder.artifacts)
    assert target.read_text() == "# mine\n" and not (place / "packages.txt").is_symlink()
    place.rename(tmp_path / "away")
    place.symlink_to(tmp_path / "away")
    with pytest.raises(names.InvalidRunFolder, match="is a symbolic link"):
        provenance.write_packages(folder.artifacts)
    folder.config.symlink_to(target)
    write_atomically(folder.config, "lr: 1")
    assert target.read_text() == "# mine\n" and not folder.config.is_symlink()


def test_a_refused_trial_does_not_stop_the_delivery_of_others(sqlite: str, tmp_path: Path) -> None:
    study = make_folder(tmp_path, sqlite)
    append(study, started(), ended())
    trials = [make_folder(tmp_path, sqlite) for _ in range(2)]
    for trial in trials:
        append(trial, started(), ended())
        study.add_child(trial.path.name)
    (trials[0].path / "logs").symlink_to(tmp_path)
    with pytest.raises(names.InvalidRunFolder, match="'logs'"):
        sync.deliver(study, patience=20)
    assert delivery_status.status(study).complete and delivery_status.status(trials[1]).complete
    assert not delivery_status.status(trials[0]).done

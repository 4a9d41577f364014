"""`rankzero export --bundle` and `rankzero import`: the same run elsewhere, and no way out."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest
import requests

from rankzero.catalog.lookup import last_end, mlflow_id
from rankzero.cli.main import main
from rankzero.errors import UserError
from rankzero.housekeeping import bundle
from rankzero.mlflow_store import uris
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.items import CLAIM, DESCRIPTION, MetricPoint
from rankzero.run_store import checkpoint_files, delivery_state
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync
from support.pictures import one_picture, taken
from support.runs import T0, append, ended, evaluated, make_folder, saved, started, steps
from support.stores import copied, list_runs


@pytest.fixture
def roots(tmp_path: Path, empty_database: Path) -> tuple[Path, Path]:
    """The folders of two embedded stores."""
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        copied(empty_database, tmp_path / name)
    return tmp_path / "mine", tmp_path / "theirs"


def study(root: Path) -> RunFolder:
    """A delivered run with a child, a checkpoint, and things that only MLflow has."""
    uri = uris.default_tracking_uri(root)
    made = []
    for name, parent in (("study", None), ("study-t00", "study")):
        changes: dict[str, Any] = {"name": name, "parent": parent}
        folder = make_folder(root, uri, artifact_root=uris.artifact_root(uri), **changes)
        folder.config.write_text("lr: 0.1\npassword: hunter2\n")
        folder.artifacts.mkdir()
        (folder.artifacts / "config.yaml").write_text("lr: 0.1\npassword: '***'\n")
        append(folder, started(), steps(1, 30), evaluated(20, 0.7), saved(folder, 20))
        append(folder, taken(folder, 20, one_picture()), ended())
        made.append(folder)
    made[0].add_child("study-t00")
    assert sync.deliver(made[0]).complete
    tracker, picture = MlflowRuns(uri), root / "worst.png"
    picture.write_bytes(b"\x89PNG of its own")
    run = tracker.find_run("study")
    tracker.log_artifact(run.run_id, picture, "pictures")
    tracker.set_tags(run.run_id, {DESCRIPTION: "a note of mine", "mlflow.runName": "the best"})
    tracker.models.log_model(
        run, made[0].artifacts, "best", 20, {"rankzero.model": "best", "rankzero.step": "20"}
    )
    tracker.models.log_model(run, made[0].artifacts, "trees", 0, {}, kind="sklearn")
    return made[0]


def held(root: Path, name: str, run_id: str | None = None) -> dict[str, Any]:
    """Everything that a store has of a run, under names that do not depend on the store."""
    tracker = MlflowRuns(uris.default_tracking_uri(root))
    run = tracker.find_run(run_id or mlflow_id(RunFolder(root / "runs" / name)) or "")
    places = tracker.deletion.places(run.run_id)
    files = [file for place in places for file in sorted(place.rglob("*")) if file.is_file()]
    return {
        "points": {key: tracker.history(run.run_id, key) for key in run.metrics},
        "params": run.params,
        "tags": {
            key: re.sub(r"(rankzero )[0-9a-f]{16}|(/runs/)[0-9a-f]{32}(?=/)", r"\1\2", value)
            for key, value in run.tags.items()
            if key not in bundle._OWN_TAGS
        },
        "models": sorted((one.name, one.model_type) for one in tracker.models.of_run(run)),
        "files": sorted((file.name, file.read_bytes()) for file in files),
        "name and status": (run.name, run.status),
    }


def test_an_imported_run_is_the_same(roots: tuple[Path, Path], tmp_path: Path) -> None:
    mine, theirs = roots
    study(mine)
    file = tmp_path / "study.zip"
    assert main(["export", "study", "--bundle", str(file), "--dir", str(mine)]) == 0
    assert main(["import", str(file), "--dir", str(theirs)]) == 0
    for name in ("study", "study-t00"):
        assert held(theirs, name) == held(mine, name)
        (checkpoint,) = (theirs / "runs" / name / "checkpoints").glob("step_*")
        there = mine / "runs" / name / "checkpoints" / checkpoint.name
        assert (checkpoint / "state.pt").read_bytes() == (there / "state.pt").read_bytes()
    configs = [path.read_bytes() for path in theirs.rglob("*.yaml")]
    assert configs and not any(b"hunter2" in config for config in configs)
    assert RunFolder(theirs / "runs" / "study").identity.experiment_file is None
    # Again: it changes nothing, and a run of the same name is no obstacle.
    before = held(theirs, "study")
    assert (
        main(["import", str(file), "--dir", str(theirs)]) == 0 and held(theirs, "study") == before
    )
    assert not list((theirs / "runs" / ".leftovers").iterdir())


def test_copy_is_the_same_run_in_another_store(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = roots
    folder, uri = study(mine), uris.default_tracking_uri(theirs)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(bundle, "_deliver_what_mlflow_had", die)
        bundle.copy(folder, uri)
    for _ in range(2):
        assert main(["copy", "study", "--to", uri, "--dir", str(mine)]) == 0
        run_id = capsys.readouterr().out.split()[-1]
        child = MlflowRuns(uri).find_run("study-t00").run_id
        for name, one in (("study", run_id), ("study-t00", child)):
            assert held(theirs, name, one) == held(mine, name)
        assert len(list_runs(uri)) == 2
    assert folder.identity.tracking_uri == uris.default_tracking_uri(mine)
    assert not any((mine / "runs" / ".leftovers").iterdir()) and not (theirs / "runs").exists()
    with pytest.raises(UserError, match="name another one"):
        bundle.copy(folder, uris.default_tracking_uri(mine))


def test_copy_has_the_checkpoints_of_mlflow_and_needs_no_temporary_folder(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = roots
    folder, before = study(mine), held(mine, "study")
    shutil.rmtree(folder.checkpoints)
    monkeypatch.setattr("tempfile.tempdir", str(mine / "full"))
    run_id = bundle.copy(folder, uris.default_tracking_uri(theirs))
    assert held(theirs, "study", run_id) == before and not folder.checkpoints.exists()


@pytest.mark.parametrize(
    ("to", "why"),
    [("http://127.0.0.1:9/", "is in that store"), ("team:5000", "write http://team:5000")],
)
def test_copy_checks_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, why: str
) -> None:
    make_folder(tmp_path, "http://127.0.0.1:9", name="one")
    assert main(["copy", "one", "--to", to, "--dir", str(tmp_path)]) == 2
    assert why in capsys.readouterr().err


def test_copy_that_was_continued_in_the_other_store_is_left_alone(
    roots: tuple[Path, Path],
) -> None:
    mine, theirs = roots
    folder, uri = study(mine), uris.default_tracking_uri(theirs)
    there, run_id = MlflowRuns(uri), bundle.copy(folder, uri)
    sample = MetricPoint("system/cpu_utilization_percentage", 1.0, 0, 90)
    there.log_metrics(run_id, [sample])
    assert bundle.copy(folder, uri) == run_id
    there.log_metrics(run_id, [MetricPoint("train/loss", 0.1, 0, 50)])
    there.set_tags(run_id, {"ours": "later"})
    with pytest.raises(UserError, match="study was continued there, up to step 50"):
        bundle.copy(folder, uri)
    append(folder, started(2), steps(6, 50), ended())
    assert bundle.copy(folder, uri) == run_id


def test_an_artifact_that_the_store_refuses_keeps_no_other_back(
    roots: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = roots
    folder, uri = study(mine), uris.default_tracking_uri(theirs)
    tracker, there = MlflowRuns(uris.default_tracking_uri(mine)), MlflowRuns(uri)
    run_id, of_copy = mlflow_id(folder) or "", bundle.copy(folder, uri)
    for number, below in enumerate(("refused", "taken")):
        path = tmp_path / f"{number}.txt"
        path.write_text(below)
        tracker.log_artifact(run_id, path, below)
    tracker.set_tags(run_id, {"later": "yes"})
    # As a server refuses the name "why?.md": nothing is written behind a link.
    (artifacts,) = {path.parent.parent for path in theirs.rglob(f"{of_copy}/artifacts/*/worst.png")}
    (artifacts / "refused").symlink_to(tmp_path)
    assert main(["copy", "study", "--to", uri, "--dir", str(mine)]) == 0
    assert "left out: the artifact refused/0.txt: " in capsys.readouterr().err
    assert (artifacts / "taken" / "1.txt").read_text() == "taken"
    assert there.find_run(of_copy).tags["later"] == "yes"


def test_what_other_programs_logged_into_the_run_is_copied(roots: tuple[Path, Path]) -> None:
    mine, theirs = roots
    folder, uri = study(mine), uris.default_tracking_uri(theirs)
    tracker, run_id = MlflowRuns(uris.default_tracking_uri(mine)), mlflow_id(folder) or ""
    more = [MetricPoint("theirs", step / 3, step, step) for step in range(5)]
    tracker.log_metrics(run_id, [*more, MetricPoint("train/loss", 0.5, 7, 90)])
    tracker.log_params(run_id, {"theirs": "x"})
    # As a later attempt on a server does, with the marks of all metrics.
    path = delivery_state.path_of(folder, 0)
    state = delivery_state.load(path)
    curves = dataclasses.replace(state.curves, marks={**state.curves.marks, "theirs": 4})
    delivery_state.save(path, dataclasses.replace(state, curves=curves))
    for _ in range(2):
        assert held(theirs, "study", bundle.copy(folder, uri)) == held(mine, "study")


def test_child_of_a_child_stays_below_it(roots: tuple[Path, Path]) -> None:
    mine, theirs = roots
    folder, uri = study(mine), uris.default_tracking_uri(theirs)
    above = dataclasses.asdict(RunFolder(mine / "runs" / "study-t00").identity)
    changes = {"name": "inner", "uuid": "inner", "parent_uuid": above["uuid"]}
    append(inner := make_folder(mine, **{**above, **changes}), started(), ended())
    folder.add_child(inner.path.name)
    bundle.copy(folder, uri)
    there = MlflowRuns(uri)
    assert there.find_run("inner").tags["mlflow.parentRunId"] == there.find_run("study-t00").run_id


def test_run_that_died_ends_in_the_bundle_when_it_died(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    append(folder := make_folder(roots[0], name="dead"), started(), steps(1, 9))
    os.utime(folder.events, (T0 + 100, T0 + 100))
    bundle.write(folder, tmp_path / "d.zip")
    found = bundle.read(tmp_path / "d.zip", roots[1] / "runs", "sqlite:///x.db", offline=True)
    end = last_end(found)
    assert end is not None and (end.status, end.time) == ("FAILED", T0 + 100)


def test_run_that_died_on_a_disk_that_takes_no_file_is_exported(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    append(folder := make_folder(roots[0], name="dead"), started(), steps(1, 9))
    os.utime(folder.events, (T0 + 100, T0 + 100))
    (folder.path / "attempt.lock").unlink(missing_ok=True)
    (folder.path / "attempt.lock").mkdir()  # cannot be opened, as on a read-only disk
    bundle.write(folder, tmp_path / "d.zip")
    assert last_end(folder) is None and (tmp_path / "d.zip").exists()


def test_models_of_one_name_are_all_copied_in_their_order(roots: tuple[Path, Path]) -> None:
    mine, theirs = roots
    folder, uri = study(mine), uris.default_tracking_uri(theirs)
    tracker, there = MlflowRuns(uris.default_tracking_uri(mine)), MlflowRuns(uri)
    run, run_id = tracker.find_run(mlflow_id(folder) or ""), bundle.copy(folder, uri)
    for text in ("older", "newer"):
        (folder.artifacts / "text").write_text(text)
        tracker.models.log_model(run, folder.artifacts, "trees", 0, {}, kind="sklearn")
    bundle.copy(folder, uri)
    assert held(theirs, "study", run_id)["models"] == held(mine, "study")["models"]
    newest = there.models.of_run(there.find_run(run_id), "sklearn")[0]
    there.models.download_checkpoint(newest.model_id, theirs / "got")
    assert (theirs / "got" / "text").read_text() == "newer"


def test_run_that_another_machine_continued_is_not_exported_by_its_first_one(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    mine, _ = roots
    folder, file = study(mine), tmp_path / "s.zip"
    tracker, run_id = MlflowRuns(uris.default_tracking_uri(mine)), mlflow_id(folder) or ""
    tracker.set_tags(run_id, {CLAIM: "2e9 b"})
    with pytest.raises(UserError, match="study was continued from another machine: a part"):
        bundle.write(folder, file)
    # It has returned since, with samples that follow those of the other machine.
    tracker.set_tags(run_id, {CLAIM: repr(T0)})
    path = delivery_state.path_of(folder, 0)
    state = delivery_state.load(path)
    curves = dataclasses.replace(state.curves, sample_offset=3)
    delivery_state.save(path, dataclasses.replace(state, curves=curves))
    with pytest.raises(UserError, match="study was continued from another machine: a part"):
        bundle.write(folder, file)
    delivery_state.save(path, state)
    bundle.write(folder, file)


def test_second_copy_brings_the_better_model_and_what_an_upload_left(
    roots: tuple[Path, Path],
) -> None:
    mine, theirs = roots
    folder, uri = study(mine), uris.default_tracking_uri(theirs)
    tracker, there = MlflowRuns(uris.default_tracking_uri(mine)), MlflowRuns(uri)
    run = tracker.find_run(mlflow_id(folder) or "")
    tracker.models.register(run, tracker.models.best_model(run) or "", "mine")
    copied = there.find_run(bundle.copy(folder, uri))
    (former,) = (one for one in there.models.of_run(copied) if one.name == "best")
    assert "mlflow.modelVersions" not in former.tags, "it is registered in the other store alone"
    (trees,) = (one for one in there.models.of_run(copied) if one.name == "trees")
    bundle.write(folder, theirs / "older.zip")
    # The best model is that of a later step now, and an upload was killed.
    tags = {"rankzero.model": "best", "rankzero.step": "30"}
    tracker.models.delete_checkpoint(tracker.models.best_model(run) or "")
    tracker.models.log_model(run, folder.artifacts, "best", 30, tags)
    there.models.delete_checkpoint(trees.model_id)
    there._client.create_logged_model(
        copied.experiment_id, name="trees", source_run_id=copied.run_id, model_type="sklearn"
    )
    bundle.copy(folder, uri)
    found = there.models.of_run(copied)
    assert held(theirs, "study", copied.run_id)["models"] == held(mine, "study")["models"]
    assert all(one.status == "READY" for one in found)
    assert former.model_id not in {one.model_id for one in found}
    newest = there.models.best_model(copied)
    assert newest is not None and there.models.register(copied, newest, "ours") == 1
    bundle.read(theirs / "older.zip", theirs / "third" / "runs", uri, offline=False)
    assert there.models.best_model(copied) == newest, "an older bundle retires no newer model"


def test_import_that_was_killed_is_continued(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = roots
    folder, file, uri = study(mine), tmp_path / "s.zip", uris.default_tracking_uri(theirs)
    bundle.write(folder, file)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sync, "deliver", lambda _: None)  # a store that does not answer
        assert main(["import", str(file), "--dir", str(theirs)]) == 1
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(bundle, "_deliver_what_mlflow_had", die)
        bundle.read(file, theirs / "runs", uri, offline=False)
    bundle.read(file, theirs / "runs", uri, offline=False)
    assert held(theirs, "study") == held(mine, "study")


def test_import_of_what_mlflow_had_is_refused_offline(
    roots: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine, theirs = roots
    bundle.write(study(mine), tmp_path / "s.zip")
    monkeypatch.setenv("RANKZERO_OFFLINE", "1")
    assert main(["import", str(tmp_path / "s.zip"), "--dir", str(theirs)]) == 2
    assert "import it without RANKZERO_OFFLINE" in capsys.readouterr().err
    assert not (theirs / "runs" / "study").exists()
    monkeypatch.delenv("RANKZERO_OFFLINE")
    assert main(["import", str(tmp_path / "s.zip"), "--dir", str(theirs)]) == 0
    monkeypatch.setenv("RANKZERO_OFFLINE", "1")
    assert main(["import", str(tmp_path / "s.zip"), "--dir", str(theirs)]) == 0, "all is there"


def test_another_run_of_the_name_is_kept(roots: tuple[Path, Path], tmp_path: Path) -> None:
    mine, theirs = roots
    bundle.write(study(mine), tmp_path / "s.zip")
    own = make_folder(theirs, name="study")
    with pytest.raises(UserError, match=r"another run 'study' .* --dir OTHER"):
        bundle.read(tmp_path / "s.zip", theirs / "runs", "sqlite:///x.db", offline=True)
    assert own.identity.uuid and not (theirs / "runs" / "study-t00").exists()


def test_nothing_is_placed_if_a_child_cannot_be(roots: tuple[Path, Path], tmp_path: Path) -> None:
    mine, theirs = roots
    bundle.write(study(mine), tmp_path / "s.zip")
    make_folder(theirs, name="study-t00")
    with pytest.raises(UserError, match="another run 'study-t00'"):
        bundle.read(tmp_path / "s.zip", theirs / "runs", "sqlite:///x.db", offline=True)
    assert not (theirs / "runs" / "study").exists()


def test_child_that_is_exported_alone_stands_alone(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    mine, theirs = roots
    study(mine)
    file, uri = tmp_path / "t.zip", uris.default_tracking_uri(theirs)
    bundle.write(RunFolder(mine / "runs" / "study-t00"), file)
    found = bundle.read(file, theirs / "runs", uri, offline=False)
    assert found.identity.parent is None and mlflow_id(found)


def test_child_that_was_deleted_alone_is_left_out(
    roots: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = roots
    child = RunFolder(study(mine).path.with_name("study-t00"))
    deletion = MlflowRuns(uris.default_tracking_uri(mine)).deletion
    deletion.delete(mlflow_id(child) or "")
    file = tmp_path / "study.zip"
    assert main(["export", "study", "--bundle", str(file), "--dir", str(mine)]) == 0
    assert capsys.readouterr().err == "left out, because they are deleted: study-t00\n"
    assert main(["import", str(file), "--dir", str(theirs)]) == 0
    assert not (theirs / "runs" / "study-t00").exists()
    assert [one.name for one in list_runs(uris.default_tracking_uri(theirs))] == ["the best"]
    assert main(["copy", "study", "--to", f"sqlite:///{tmp_path}/new.db", "--dir", str(mine)]) == 0
    assert "left out" in capsys.readouterr().err


def test_second_import_keeps_what_was_changed_since(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    mine, theirs = roots
    file, uri = tmp_path / "s.zip", uris.default_tracking_uri(theirs)
    bundle.write(study(mine), file)
    run_id = mlflow_id(bundle.read(file, theirs / "runs", uri, offline=False)) or ""
    MlflowRuns(uri).set_tags(run_id, {DESCRIPTION: "my own words"})
    bundle.read(file, theirs / "runs", uri, offline=False)
    assert MlflowRuns(uri).find_run(run_id).tags[DESCRIPTION] == "my own words"


def test_import_that_would_change_nothing_is_refused(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    mine, theirs = roots
    folder = make_folder(mine, uris.default_tracking_uri(mine), name="one")
    append(folder, started(), ended())
    file, runs, uri = tmp_path / "o.zip", theirs / "runs", uris.default_tracking_uri(theirs)
    bundle.write(folder, file)
    with pytest.raises(UserError, match=f"one is here already.* copy one --to {uri} --dir"):
        bundle.read(file, mine / "runs", uri, offline=True)
    bundle.read(file, runs, uri, offline=True)
    append(folder, started(2), steps(31, 40), ended())
    bundle.write(folder, file)
    with pytest.raises(UserError, match="the bundle has more of it: import it with --dir OTHER"):
        bundle.read(file, runs, uri, offline=True)


def test_export_takes_no_secret_and_no_run_that_changes(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "https://me:hunter2@store/x"
    folder = make_folder(roots[0], secret, name="one", artifact_root=secret)
    append(folder, started(), ended())
    bundle.write(folder, tmp_path / "o.zip")
    with zipfile.ZipFile(tmp_path / "o.zip") as archive:
        assert not any(b"hunter2" in archive.read(name) for name in archive.namelist())
    monkeypatch.setattr(bundle, "_write_what_mlflow_has", lambda *_: append(folder, started(2)))
    with pytest.raises(UserError, match="continued meanwhile"):
        bundle.write(folder, tmp_path / "p.zip")
    assert not (tmp_path / "p.zip").exists()


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (requests.ConnectionError("the server has gone"), r"^the server has gone$"),
        (OSError(errno.ENOSPC, "full"), r"^cannot write .*o\.zip: .*full$"),
    ],
)
def test_export_blames_the_file_for_no_error_of_a_server(
    error: OSError,
    shown: str,
    roots: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    append(folder := make_folder(roots[0]), started(), ended())
    monkeypatch.setattr(bundle, "_write_what_mlflow_has", fail)
    with pytest.raises((UserError, requests.ConnectionError), match=shown):
        bundle.write(folder, tmp_path / "o.zip")


@pytest.mark.parametrize("name", [".", "runs/one/events.jsonl", "runs/one/run.json", "bundle.json"])
def test_other_damage_is_one_message(tmp_path: Path, name: str) -> None:
    file, one = tmp_path / "d.zip", make_folder(tmp_path / "x", name="one").path / "run.json"
    manifest = json.dumps({"version": 1, "runs": ["one"]})
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bundle.json", manifest + " " * (name == "bundle.json") * (1 << 25))
        archive.writestr(
            "runs/one/run.json", "{}" if name == "runs/one/run.json" else one.read_text()
        )
        if name in (".", "runs/one/events.jsonl"):
            archive.writestr(name, bytes(1 << 16))
            content = zipfile.ZipFile.getinfo(archive, name).header_offset
    if name == "runs/one/events.jsonl":
        spoiled = bytearray(file.read_bytes())
        spoiled[content + 30 + len(name)] = 0xFF  # no kind of deflated block
        file.write_bytes(spoiled)
    with pytest.raises(UserError):
        bundle.read(file, tmp_path / "store" / "runs", "sqlite:///x.db", offline=True)


LINK = (stat.S_IFLNK | 0o777) << 16


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("../evil", 0),
        ("runs/one/../../../../evil", 0),
        ("/tmp/evil", 0),
        ("runs/one/x\\..\\evil", 0),
        ("runs/other/run.json", 0),
        ("runs/run.json", 0),
        ("elsewhere/one/x", 0),
        ("runs/one/link", LINK),
        ("runs/one/pipe", (stat.S_IFIFO | 0o666) << 16),
    ],
)
def test_hostile_archive_is_refused_as_a_whole(tmp_path: Path, name: str, mode: int) -> None:
    file, runs = tmp_path / "evil.zip", tmp_path / "store" / "runs"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("bundle.json", json.dumps({"version": 1, "runs": ["one"]}))
        identity = make_folder(tmp_path / "x", name="one").path / "run.json"
        archive.write(identity, "runs/one/run.json")
        member = zipfile.ZipInfo(name)
        member.external_attr = mode
        archive.writestr(member, "/etc/passwd")
    with pytest.raises(UserError, match="no file of a run"):
        bundle.read(file, runs, "sqlite:///x.db", offline=True)
    assert [path.name for path in runs.rglob("*")] == [".leftovers"]
    assert not (tmp_path / "evil").exists() and not Path("/tmp/evil").exists()


def test_run_of_a_bundle_is_not_its_own_parent(tmp_path: Path) -> None:
    file = tmp_path / "evil.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("bundle.json", json.dumps({"version": 1, "runs": ["a", "b"]}))
        for name, parent in (("a", "a"), ("b", "b")):
            folder = make_folder(tmp_path / "x", name=name, parent=parent)
            archive.write(folder.path / "run.json", f"runs/{name}/run.json")
    found = bundle.read(file, tmp_path / "runs", "sqlite:///x.db", offline=True)
    assert found.identity.parent is RunFolder(tmp_path / "runs" / "b").identity.parent is None


def test_damaged_archive_is_one_message(roots: tuple[Path, Path], tmp_path: Path) -> None:
    mine, theirs = roots
    file = tmp_path / "s.zip"
    bundle.write(study(mine), file)
    whole = file.read_bytes()
    spoiled = bytearray(whole)
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda member: member.compress_size)
        following = [m.header_offset for m in archive.infolist()] + [archive.start_dir]
    end = min(offset for offset in following if offset > largest.header_offset)
    spoiled[end - largest.compress_size // 2] ^= 1  # amid its content
    for content in (b"", b"no archive", whole[: len(whole) // 2], bytes(spoiled)):
        file.write_bytes(content)
        with pytest.raises(UserError, match="cannot be imported"):
            bundle.read(file, theirs / "runs", "sqlite:///x.db", offline=True)
    assert not (theirs / "runs" / "study").exists()


def test_checkpoint_and_page_need_no_mlflow(roots: tuple[Path, Path], tmp_path: Path) -> None:
    mine, theirs = roots
    folder = make_folder(mine, uris.default_tracking_uri(mine), name="offline")
    append(folder, started(), steps(1, 5), saved(folder, 5), ended())
    bundle.write(folder, tmp_path / "o.zip")
    shutil.rmtree(mine)
    uri = uris.default_tracking_uri(theirs)
    found = bundle.read(tmp_path / "o.zip", theirs / "runs", uri, offline=True)
    assert found.events.exists() and checkpoint_files.folder_of(found.checkpoints, 5).is_dir()
    assert sync.deliver(found).complete

"""`--tag`, `--note` and `--name` of every command that makes runs, and what reads them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from rankzero.cli import main, options
from rankzero.cli.commands.search import open_run, study_identity
from rankzero.cli.commands.train import experiment_of
from rankzero.errors import UserError
from rankzero.events import RunEnded, RunStarted
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store.journal import read_all
from rankzero.tracking import sync
from rankzero.tuning.reports.study_run import StudyRun
from rankzero.tuning.space import make_space
from support.commands import TINY, Command, events, tracked
from support.runs import append, ended, make_folder, started
from support.training import tiny

WORDS = ("--tag", "team=vision", "--tag", "api_key=abc", "--note", "a first try", "--name", "mine")


@pytest.mark.parametrize("verb", ["train", "repeat", "search", "probe", "compare", "profile"])
def test_every_command_that_makes_runs_takes_them(verb: str) -> None:
    found = main.parse([verb, "x.py", *WORDS, "lr=1"])
    tags = options.tags_of(found)
    assert tags["team"] == "vision" and tags["mlflow.note.content"] == "a first try"
    assert tags["api_key"] != "abc" and found.settings == ["lr=1"]
    assert (found.run_name if verb in ("train", "repeat") else found.study) == "mine"


@pytest.mark.parametrize(
    "tag",
    [
        "team",
        "=x",
        "team=",
        "rankzero.x=1",
        "status=new",
        "a b=c",
        "../x=1",
        "a//b=1",
        "k" * 251 + "=1",
    ],
)
def test_a_tag_that_would_be_lost_is_refused(tag: str) -> None:
    with pytest.raises(UserError, match="write KEY=VALUE, such as team=vision"):
        main.parse(["train", "x.py", "--tag", tag])


def test_tags_and_the_note_of_a_run(rankzero: Command) -> None:
    rankzero.succeed("train", TINY, "--nproc", 1, "train.epochs=1", *WORDS)
    tags = tracked(rankzero.runs[0]).tags
    assert tags["team"] == "vision"
    assert tags["mlflow.note.content"].startswith("a first try\n\n<!-- rankzero")
    listed = rankzero("runs", "team=vis*", "--sort", "team")[1].splitlines()
    assert listed[0].split()[-1] == "team" and listed[1].split()[-1] == "vision"
    assert "no run matches" in rankzero("runs", "team!=vision")[1]
    assert json.loads(rankzero("runs", "--json")[1])[0]["tags"]["team"] == "vision"
    report = rankzero("report", "mine")[1]
    assert report.startswith("a first try\n\n### FINISHED") and "team=vision" in report
    assert "--tag team=vision" in report and "--name" not in report


def test_a_note_that_was_edited_outlives_a_restart(new_store: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, f"sqlite:///{new_store}")
    first = RunStarted(1.8e9, {}, {"mlflow.note.content": "first", "team": "a"}, 1)
    append(folder, first)
    sync.deliver(folder)
    store = MlflowRuns(folder.identity.tracking_uri)
    run_id = store.find_run(folder.identity.name).run_id
    store.set_tags(run_id, {"mlflow.note.content": "edited", "team": "b"})
    append(folder, RunStarted(1.8e9, {}, first.environment, 2), ended())
    sync.deliver(folder)
    assert store.description(run_id).startswith("edited")


def test_the_runs_of_a_study_have_its_tags(tmp_path: Path) -> None:
    identity = make_folder(tmp_path, name="study").identity
    tags = {"team": "vision", "mlflow.note.content": "a first try"}
    runs = tmp_path / "runs"
    with StudyRun.open(runs, identity, tiny(), [], offline=True, tags=tags) as study:
        assert study.environment["team"] == "vision"
        assert "mlflow.note.content" not in study.environment
    begun = next(one for one in events(study.folder) if isinstance(one, RunStarted))
    assert tags.items() <= begun.environment.items()


def test_a_name_of_mlflow_is_understood_where_a_run_is_continued_or_copied(
    new_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, f"sqlite:///{new_store}", name="first")
    (tmp_path / "mlflow.db").symlink_to(new_store)
    append(folder, started(), ended())
    folder.config.write_text("lr: 0.5\n")
    sync.deliver(folder)
    store = MlflowRuns(folder.identity.tracking_uri)
    run_id = store.find_run("first").run_id
    store.set_tags(run_id, {"mlflow.runName": "the good one"})
    words = ["train", str(TINY), "--dir", str(tmp_path), "--from"]
    for name in ("the good one", "first", run_id):
        assert experiment_of(main.parse([*words, name])).lr == 0.5  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="--from nobody is not a file, nor in"):
        experiment_of(main.parse([*words, "nobody"]))
    folder.config.unlink()
    with pytest.raises(UserError, match="A study has a sweet spot once a configuration reached"):
        experiment_of(main.parse([*words, "first"]))


def test_only_new_makes_a_further_study_of_the_same_name(tmp_path: Path) -> None:
    def begun(name: str, command: str) -> None:
        folder = make_folder(tmp_path, name=name)
        append(folder, RunStarted(1.8e9, {}, {"rankzero.command": f"/bin/rankzero {command}"}, 1))

    def named(*words: str) -> str:
        given = main.parse(["search", str(TINY), "--offline", "--dir", str(tmp_path), *words])
        return study_identity(given, make_space(tiny(), 1, 0.5), "search").name

    begun("sweep", "search x.py --name sweep")
    begun("sweep-2", "search x.py --name=sweep-2 --new")
    begun("sweep-3", "train x.py --name sweep-3")
    assert named("--name", "sweep") == "sweep" and named("--name", "sweep-2") == "sweep-2"
    assert named("--name", "sweep", "--new") == "sweep-4"
    begun("sweep-4", "search x.py --name sweep --new")
    assert named("--name", "sweep") == "sweep-4" and named("--name", "sweep-2") == "sweep-2"
    assert named("--name", "other", "--new") == "other"
    # Erased ones leave gaps.
    for name in ("sweep", "sweep-2"):
        shutil.rmtree(tmp_path / "runs" / name)
    assert named("--name", "sweep") == "sweep-4"
    assert named("--name", "sweep", "--new") == "sweep-5"
    shutil.rmtree(tmp_path / "runs" / "sweep-4")
    assert named("--name", "sweep", "--new") == "sweep", "the others are no studies of that name"


@pytest.mark.parametrize(
    ("verb", "again"),
    [
        ("compare", None),
        ("profile", None),
        ("probe", f"rankzero probe {TINY} --name run"),
        ("repeat", "rankzero repeat run"),
    ],
)
def test_ctrl_c_names_the_command_that_continues_if_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, again: str | None
) -> None:
    words = [verb, str(TINY), "--name", "run", *(["--new"] if verb == "probe" else [])]
    monkeypatch.setattr(sys, "argv", ["rankzero", *words])
    given = main.parse([*words, "--offline", "--dir", str(tmp_path)])
    identity = options.identity_for(given, "run")
    with pytest.raises(KeyboardInterrupt), open_run(given, identity, tiny()) as study:
        raise KeyboardInterrupt
    (reason,) = [one.reason for one in read_all(study.folder.events) if isinstance(one, RunEnded)]
    if again is None:
        assert reason == "stopped by Ctrl-C"
    else:
        assert reason.startswith("stopped by Ctrl-C; `") and reason.endswith(f"{again}` resumes it")


def test_a_study_does_not_go_on_in_a_run_of_another_kind(tmp_path: Path) -> None:
    for name, command in (("a", "train x.py"), ("b", "search x.py"), ("c", "probe x.py")):
        folder = make_folder(tmp_path, name=name)
        append(folder, RunStarted(1.8e9, {}, {"rankzero.command": f"/bin/rankzero {command}"}, 1))
    append(make_folder(tmp_path, name="d"), RunStarted(1.8e9, {}, {"rankzero.own_loop": "true"}, 1))

    def named(verb: str, name: str) -> str:
        words = [verb, str(TINY), "--offline", "--dir", str(tmp_path), "--name", name]
        return study_identity(main.parse(words), make_space(tiny(), 1, 0.5), verb).name

    assert named("search", "b") == "b" and named("probe", "c") == "c" and named("probe", "e") == "e"
    for verb, name in ("search", "a"), ("probe", "b"), ("search", "c"), ("search", "d"):
        with pytest.raises(UserError, match=f"run '{name}' already, which is no {verb}"):
            named(verb, name)

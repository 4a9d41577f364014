"""The provenance of a run: complete, without secrets, without running foreign programs."""

from __future__ import annotations

import dataclasses
import errno
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankzero.run_store import provenance
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.provenance import (
    Provenance,
    allowed,
    changed_between,
    collect,
    environment,
    record,
    write_artifacts,
    write_packages,
)

TOKEN = "ghp_" + "a1B2" * 9
DIGITS = Identity("digits", "1", "digits", "sqlite:////nowhere/mlflow.db")


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", *words]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "a.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def found_in(folder: Path) -> Provenance:
    return collect(folder, ["rankzero", "train"], {})


def test_a_clean_tree_has_a_commit_and_no_diff(repository: Path) -> None:
    git(repository, "remote", "add", "origin", f"https://me:{TOKEN}@example.invalid/x.git")
    found = found_in(repository)
    assert (found.commit, found.branch, found.diff) == (
        git(repository, "rev-parse", "HEAD"),
        "trunk",
        None,
    )
    assert found.repository == "https://example.invalid/x.git"
    assert environment(found)["rankzero.dirty"] == "false"


def test_a_dirty_tree_has_a_diff(repository: Path, tmp_path: Path) -> None:
    (repository / "a.py").write_text(f"x = 2\npassword = '{TOKEN}'\n")
    (repository / "new.py").write_text("y = 1\n")
    found = found_in(repository)
    assert found.diff is not None
    assert (
        "+x = 2" in found.diff and "# untracked: new.py" in found.diff and TOKEN not in found.diff
    )
    write_artifacts(found, tmp_path / "artifacts")
    written = tmp_path / "artifacts" / "provenance"
    assert "+x = 2" in (written / "diff.patch").read_text()
    assert json.loads((written / "environment.json").read_text())["commit"] == found.commit


def test_a_clean_attempt_leaves_no_diff_of_a_dirty_one(repository: Path, tmp_path: Path) -> None:
    git(repository, "commit", "--allow-empty", "-m", "clean")
    clean = found_in(repository)
    provenance.write_artifacts(dataclasses.replace(clean, diff="+ lr = 7"), tmp_path)
    assert provenance.read_artifacts(tmp_path)[1] == "+ lr = 7"
    provenance.write_artifacts(clean, tmp_path)
    assert provenance.read_artifacts(tmp_path)[1] == ""
    # So that its upload replaces that of the attempt before.
    assert (tmp_path / "provenance/diff.patch").read_text() == ""
    provenance.write_artifacts(clean, tmp_path / "new")
    assert not (tmp_path / "new/provenance/diff.patch").exists()


def test_new_files_make_a_tree_dirty_from_any_folder(repository: Path) -> None:
    (repository / "sub").mkdir()
    (repository / "new.py").write_text("y = 1\n")
    (repository / ".gitignore").write_text("ignored\n")
    (repository / "ignored").touch()
    assert found_in(repository / "sub").diff == "# untracked: .gitignore\n# untracked: new.py\n"


def test_what_changes_in_the_folder_of_the_runs_is_no_change(repository: Path) -> None:
    folder = RunFolder.create(repository / "my runs" / "runs", DIGITS)
    assert (repository / "my runs/.gitignore").read_text() == "*\n"
    assert git(repository, "status", "--short") == ""
    (repository / "my runs/.gitignore").unlink()  # as in a folder of an earlier version
    assert found_in(repository).dirty == "untracked"
    found = collect(repository, [], {}, folder.path.parents[1])
    assert (found.diff, found.dirty) == (None, "false")
    git(repository, "add", "--all")
    assert collect(repository, [], {}, folder.path.parents[1]).diff is None


def test_a_link_to_the_folder_of_the_runs_is_no_change(repository: Path) -> None:
    (repository / "mlruns").symlink_to(repository.parent)
    assert collect(repository, [], {}, repository / "mlruns").dirty == "false"


@pytest.mark.parametrize("at", [".", "project"])
def test_code_in_the_folder_of_the_runs_is_the_users(
    repository: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = repository / "project"
    folder = RunFolder.create(root / "runs", DIGITS)
    (root / ".gitignore").unlink()
    (root / "mine.py").write_text("y = 1\n")
    git(repository, "add", str(root / "mine.py"))
    monkeypatch.chdir(repository / at)
    file = str(root / "mine.py") if at == "." else None
    assert record(folder.artifacts, [], file)["rankzero.dirty"] == "true"
    diff = (folder.artifacts / "provenance/diff.patch").read_text()
    assert "+y = 1" in diff and "run.json" not in diff


def test_a_folder_that_was_there_gets_no_gitignore(repository: Path) -> None:
    RunFolder.create(repository / "runs", DIGITS)
    assert not (repository / ".gitignore").exists()
    assert collect(repository, [], {}, repository).dirty == "untracked"


def test_a_diff_tells_whether_it_restores_the_changes(repository: Path) -> None:
    (repository / "new.py").write_text("y = 1\n")
    assert environment(found_in(repository))["rankzero.dirty"] == "untracked"
    (repository / "a.py").write_text("x = 2\n")
    found = found_in(repository)
    assert found.dirty == "true" and found.diff
    git(repository, "checkout", "-q", "a.py")
    apply = ["git", "apply", "-"]
    subprocess.run(apply, cwd=repository, check=True, input=found.diff, text=True)
    assert (repository / "a.py").read_text() == "x = 2\n"
    (repository / "a.py").write_text(f"password = '{TOKEN}'\n")
    assert found_in(repository).dirty == "incomplete"  # redacted
    git(repository, "commit", "-aqm", "second")
    (repository / "a.py").write_bytes(bytes(range(256)))
    assert found_in(repository).dirty == "incomplete"  # git shows no bytes


def test_a_detached_head_has_a_commit_and_no_branch(repository: Path) -> None:
    git(repository, "checkout", "-q", "--detach")
    found = found_in(repository)
    assert found.commit == git(repository, "rev-parse", "HEAD") and found.branch is None
    assert "mlflow.source.git.branch" not in environment(found)


def test_a_diff_that_takes_too_long_does_not_make_the_tree_clean(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path_factory.mktemp("slow") / "git"
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *" diff "*) sleep 60;; esac\nexec {shutil.which("git")} "$@"\n'
    )
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "_GIT_SECONDS", 1.0)
    found = collect(repository, ["rankzero", "train"], {})
    assert "did not list all changes" in str(found.diff)
    assert environment(found)["rankzero.dirty"] == "incomplete"


def test_a_large_diff_is_cut_at_a_line(repository: Path) -> None:
    (repository / "a.py").write_text(f"x = 1\n{'y = 2' * 20}\n" * 20_000)
    for number in range(300):
        (repository / f"new-{number:03}.py").touch()
    lines = str(found_in(repository).diff).splitlines()
    assert lines[200] == "# untracked: 100 more" and lines[-1] == "# cut: the diff is larger"
    assert lines[-2] in ("+x = 1", f"+{'y = 2' * 20}")


def test_without_a_commit_or_a_repository_there_are_no_git_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert found_in(tmp_path).commit is None
    git(tmp_path, "init", "-q")
    assert found_in(tmp_path).commit is None
    monkeypatch.setenv("PATH", "")
    assert found_in(tmp_path).commit is None


def test_the_settings_of_a_repository_run_nothing(repository: Path) -> None:
    attributes = ["*.py diff=x filter=y=z\n", "*.md filter=process\n"]
    (repository / ".gitattributes").write_text("".join(attributes))
    (repository / "b.md").touch()
    git(repository, "add", "--all")
    git(repository, "commit", "-q", "-m", "second")
    for key in (
        "diff.external",
        "core.fsmonitor",
        "core.pager",
        "core.hooksPath",
        "diff.x.textconv",
        "diff.x.command",
        "filter.y=z.clean",
        "filter.process.process",
    ):
        git(repository, "config", key, f"touch {repository}/executed; cat")
    git(repository, "config", "filter.process.required", "true")
    (repository / "a.py").write_text("x = 3\n")
    (repository / "b.md").write_text("changed\n")
    (repository / "executed").unlink(missing_ok=True)
    assert "+x = 3" in str(found_in(repository).diff)
    assert not (repository / "executed").exists()


@pytest.mark.parametrize("how", ["diff", "log"])
def test_the_settings_of_a_submodule_run_nothing(repository: Path, how: str) -> None:
    inner = repository / "inner"
    inner.mkdir()
    git(inner, "init", "-q", "-b", "trunk")
    (inner / ".gitattributes").write_text("*.py diff=x filter=y\n")
    (inner / "c.py").write_text("z = 1\n")
    git(inner, "add", "--all")
    git(inner, "commit", "-q", "-m", "first")
    (repository / ".gitmodules").write_text(
        '[submodule "inner"]\n\tpath = inner\n\turl = ./inner\n'
    )
    git(repository, "add", "--all")
    git(repository, "commit", "-q", "-m", "second")
    first = git(repository, "rev-parse", "HEAD")
    (inner / "c.py").write_text("z = 2\n")
    git(inner, "commit", "-q", "-a", "-m", "moved")
    for key in (
        "diff.external",
        "core.fsmonitor",
        "diff.x.textconv",
        "diff.x.command",
        "filter.y.clean",
    ):
        git(inner, "config", key, f"touch {repository}/executed; cat")
    (inner / "c.py").write_text("z = 3\n")
    git(repository, "config", "diff.submodule", how)
    git(repository, "config", "diff.ignoreSubmodules", "none")
    git(repository, "config", "submodule.inner.ignore", "none")
    moved = str(found_in(repository).diff)
    assert (
        "+Subproject commit" in moved
        and "+z = 3" in moved
        and not (repository / "executed").exists()
    )
    git(repository, "-c", "core.fsmonitor=false", "commit", "-q", "-m", "third", "inner")
    (repository / "executed").unlink(missing_ok=True)
    assert "inner" in changed_between(repository, first, "HEAD")
    found_in(repository)
    assert not (repository / "executed").exists()


def nested(repository: Path) -> list[Path]:
    """Give a repository a submodule that has one, too; return the three folders."""
    parts = [repository, repository / "in ner", repository / "in ner" / "deep"]
    for outer, inner in itertools.pairwise(parts):
        inner.mkdir()
        git(inner, "init", "-q")
        (inner / "c.py").write_text("z = 1\n")
        named = f'[submodule "{inner.name}"]\n\tpath = {inner.name}\n\turl = ./{inner.name}\n'
        (outer / ".gitmodules").write_text(named)
    for folder in reversed(parts):
        git(folder, "add", "--all")
        git(folder, "commit", "-q", "-m", "all")
    return parts


def test_submodule_that_git_does_not_read_is_named(repository: Path) -> None:
    *_, deep = nested(repository)
    shutil.rmtree(deep / ".git")
    (deep / ".git").mkdir()  # git takes the repository above
    found = found_in(repository)
    assert found.dirty == "false"
    assert found.diff == "# submodule in ner/deep: not looked at by git\n"


def test_edits_in_submodules_are_changes_that_the_diff_restores(repository: Path) -> None:
    parts = nested(repository)
    assert found_in(repository).dirty == "false"
    (parts[1] / "new.py").touch()
    assert found_in(repository).diff == "# untracked: in ner/new.py\n"
    for folder in parts[1:]:
        (folder / "c.py").write_text("z = 2\n")
    git(repository, "config", "diff.noprefix", "true")
    found = found_in(repository)
    assert found.dirty == "true" and found.diff
    for folder in parts[1:]:
        git(folder, "checkout", "-q", "c.py")
    apply = ["git", "apply", "-"]
    subprocess.run(apply, cwd=repository, check=True, input=found.diff, text=True)
    assert [(folder / "c.py").read_text() for folder in parts[1:]] == ["z = 2\n"] * 2
    shutil.rmtree(parts[2])
    parts[2].mkdir()  # as in a clone without --recurse-submodules
    assert "deep" not in str(found_in(repository).diff)
    # Another project's changes stay out, also where a file calls it a submodule.
    shutil.move(parts[1], other := repository.parent / f"{repository.name} other")
    parts[1].symlink_to(other)
    assert "z = 2" not in str(found_in(repository).diff)


def test_the_code_is_where_the_experiments_file_is(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, elsewhere = git(repository, "rev-parse", "HEAD"), tmp_path_factory.mktemp("elsewhere")
    artifacts = RunFolder.create(elsewhere / "mlruns" / "runs", DIGITS).artifacts
    (elsewhere / "link.py").symlink_to(repository / "a.py")
    monkeypatch.chdir(elsewhere)
    for file in (repository / "a.py", f"{repository / 'a.py'}:Class", "link.py", "link.py:Class"):
        assert record(artifacts, [], str(file))["mlflow.source.git.commit"] == head
    # A program's own loop, here and in a repository of another folder.
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(repository / "a.py"), raising=False)
    assert record(artifacts, [])["mlflow.source.git.commit"] == head
    monkeypatch.setattr(main, "__file__", str(elsewhere / "b.py"), raising=False)
    assert "mlflow.source.git.commit" not in record(artifacts, [])
    monkeypatch.chdir(repository)
    assert record(artifacts, [])["mlflow.source.git.commit"] == head
    assert "mlflow.source.git.commit" not in record(artifacts, [], str(elsewhere / "b.py"))


def test_a_repository_that_git_refuses_is_noted_once(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = RunFolder.create(repository / "mlruns" / "runs", DIGITS).artifacts
    (repository / ".git" / "config").write_text("[broken\n")
    provenance._note_once.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Full())
        record(artifacts, [], str(repository / "a.py"))  # ends no run
    provenance._note_once.cache_clear()
    for _ in range(2):
        record(artifacts, [], str(repository / "a.py"))
    printed = capsys.readouterr().err
    assert printed.count("note: ") == 1 and "the run has no commit: fatal: bad config" in printed
    facts = json.loads((artifacts / "provenance" / "environment.json").read_text())
    assert facts["git_error"].startswith("fatal: bad config")


def test_missing_objects_are_not_fetched(repository: Path) -> None:
    """In a partial clone, git would fetch them by a program that the repository names."""
    blob = git(repository, "rev-parse", "HEAD:a.py")
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    for key, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": f"{repository}/nowhere",
        "remote.origin.promisor": "true",
        "remote.origin.partialCloneFilter": "blob:none",
        "remote.origin.uploadPack": f"touch {repository}/executed; cat",
    }.items():
        git(repository, "config", key, value)
    (repository / "a.py").write_text("x = 3\n")
    assert "did not list all changes" in str(found_in(repository).diff)
    assert not (repository / "executed").exists()


def test_packages_are_listed(tmp_path: Path) -> None:
    write_packages(tmp_path)
    lines = (tmp_path / "provenance" / "packages.txt").read_text().splitlines()
    assert any(line.startswith("torch==") for line in lines) and len(lines) > 20


def test_only_listed_variables_are_recorded() -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "NCCL_AUTH_TOKEN": "x",
    }
    assert allowed(environ) == {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO"}


def test_a_secret_is_redacted_in_each_part_of_the_provenance(
    repository: Path, tmp_path: Path
) -> None:
    secret = "correct/horse,battery;staple"
    git(
        repository,
        "remote",
        "add",
        "origin",
        f"https://example.invalid/x.git?private_token={secret}",
    )
    (repository / "a.py").write_text(f"password: str = '{secret}'\n")
    (repository / "api_key=battery").touch()
    environ = {
        "MLFLOW_TRACKING_PASSWORD": secret,
        "NCCL_AUTH": secret,
        "NCCL_DEBUG_FILE": f"/x?token={secret}",
    }
    found = collect(
        repository,
        ["train", "--token", secret, f"hf_token={secret}", f"s3://a:{secret}@b"],
        environ,
    )
    write_artifacts(found, tmp_path / "artifacts")
    written = [path.read_text() for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
    assert len(written) == 2 and not any(
        "battery" in text for text in [*written, str(environment(found))]
    )


def test_a_run_folder_that_is_gone_is_not_created_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_packages(tmp_path / "moved away" / "artifacts")
    assert not (tmp_path / "moved away").exists()

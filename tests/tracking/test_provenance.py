"""Where a run comes from, and that no secret comes with it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.tracking.provenance import Provenance, allowed, collect, environment, write_artifacts, write_packages
from rankzero.tracking.secrecy import command_without_secrets, text_without_secrets, url_without_secrets

TOKEN = "ghp_" + "a1B2" * 9


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "a.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def found_in(folder: Path) -> Provenance:
    return collect(folder, ["rankzero", "train"], {})


def test_a_clean_tree(repository: Path) -> None:
    git(repository, "remote", "add", "origin", f"https://me:{TOKEN}@example.invalid/x.git")
    found = found_in(repository)
    assert (found.commit, found.branch, found.diff) == (git(repository, "rev-parse", "HEAD"), "trunk", None)
    assert found.repository == "https://example.invalid/x.git"
    assert environment(found)["rankzero.dirty"] == "false"


def test_a_dirty_tree_keeps_its_diff(repository: Path, tmp_path: Path) -> None:
    (repository / "a.py").write_text(f"x = 2\npassword = '{TOKEN}'\n")
    (repository / "new.py").write_text("y = 1\n")
    found = found_in(repository)
    assert found.diff is not None
    assert "+x = 2" in found.diff and "# untracked: new.py" in found.diff and TOKEN not in found.diff
    write_artifacts(found, tmp_path / "artifacts")
    written = tmp_path / "artifacts" / "provenance"
    assert "+x = 2" in (written / "diff.patch").read_text()
    assert json.loads((written / "environment.json").read_text())["commit"] == found.commit


def test_a_detached_head_has_a_commit(repository: Path) -> None:
    git(repository, "checkout", "-q", "--detach")
    assert found_in(repository).commit == git(repository, "rev-parse", "HEAD")


def test_without_a_commit_or_a_repository_git_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert found_in(tmp_path).commit is None
    git(tmp_path, "init", "-q")
    assert found_in(tmp_path).commit is None
    monkeypatch.setenv("PATH", "")
    assert found_in(tmp_path).commit is None


def test_a_repositorys_settings_run_nothing(repository: Path) -> None:
    for key in ("diff.external", "core.fsmonitor", "core.pager", "diff.x.textconv"):
        git(repository, "config", key, f"touch {repository}/executed; cat")
    (repository / ".gitattributes").write_text("*.py diff=x\n")
    (repository / "a.py").write_text("x = 3\n")
    assert "+x = 3" in str(found_in(repository).diff)
    assert not (repository / "executed").exists()


def test_packages_are_listed(tmp_path: Path) -> None:
    write_packages(tmp_path)
    lines = (tmp_path / "provenance" / "packages.txt").read_text().splitlines()
    assert any(line.startswith("torch==") for line in lines) and len(lines) > 20


def test_only_listed_variables_are_kept() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "HOME": "/root", "NCCL_AUTH_TOKEN": "x"}
    assert allowed(environ) == {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://a:b@host/x", "https://host/x"),
        ("see https://host/x?y=1", "see https://host/x?y=1"),
        ("git@host:x.git", "git@host:x.git"),
    ],
)
def test_urls_lose_their_credentials(text: str, kept: str) -> None:
    assert url_without_secrets(text) == kept


@pytest.mark.parametrize(
    "text", ["tokenizer=gpt2", "max_tokens=512", "author = me", "lr=1e-3", "train.batch_size=3", "keyboard: x"]
)
def test_harmless_words_survive(text: str) -> None:
    assert text_without_secrets(text) == text


places = st.sampled_from(
    [
        "password={}", "--api-key={}", "HF_TOKEN: '{}'", '"secret": "{}"', "https://user:{}@host/x", "db_passwd = {}",
        "aws_secret_access_key={}", "auth={}", "client_secret:{}",
    ]
)  # fmt: skip
secrets = st.text("abcdefghijkXYZ0123456789_-", min_size=12, max_size=40)


@given(places, secrets, st.text("abc =\n", max_size=20), st.text("abc =\n", max_size=20))
def test_a_planted_secret_does_not_survive(place: str, secret: str, before: str, after: str) -> None:
    assert secret not in text_without_secrets(f"{before}\n{place.format(secret)}\n{after}")


@pytest.mark.parametrize("shape", [TOKEN, "AKIA" + "A1B2C3D4" * 2, "hf_" + "a" * 30, "sk-" + "b" * 30,
                                   "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----"])  # fmt: skip
def test_what_is_shaped_like_a_secret_does_not_survive(shape: str) -> None:
    assert shape not in text_without_secrets(f"x = f({shape!r}) {shape}")
    assert "[secret]" in text_without_secrets(shape)


@given(st.sampled_from(["--token", "--api-key", "--wandb-password"]), secrets)
def test_an_options_value_does_not_survive(option: str, secret: str) -> None:
    assert secret not in command_without_secrets(["train", option, secret, "lr=1"])
    assert secret not in command_without_secrets(["train", f"{option}={secret}"])

"""Where a run comes from, and that no secret comes with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankzero.redaction.text import (
    command_without_secrets,
    line_without_secrets,
    settings_without_secrets,
    text_without_secrets,
    url_without_secrets,
)
from rankzero.run_store.delivery_state import DeliveryState
from rankzero.run_store.provenance import (
    Provenance,
    allowed,
    changed_between,
    collect,
    environment,
    write_artifacts,
    write_packages,
)

TOKEN = "ghp_" + "a1B2" * 9


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


def found_in(folder: Path) -> Provenance:
    return collect(folder, ["rankzero", "train"], {})


def test_a_clean_tree(repository: Path) -> None:
    git(repository, "remote", "add", "origin", f"https://me:{TOKEN}@example.invalid/x.git")
    found = found_in(repository)
    assert (found.commit, found.branch, found.diff) == (
        git(repository, "rev-parse", "HEAD"),
        "trunk",
        None,
    )
    assert found.repository == "https://example.invalid/x.git"
    assert environment(found)["rankzero.dirty"] == "false"


def test_a_dirty_tree_keeps_its_diff(repository: Path, tmp_path: Path) -> None:
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


def test_a_tree_with_new_files_only_is_dirty_wherever_the_run_starts(repository: Path) -> None:
    (repository / "sub").mkdir()
    (repository / "new.py").write_text("y = 1\n")
    (repository / ".gitignore").write_text("ignored\n")
    (repository / "ignored").touch()
    assert found_in(repository / "sub").diff == "# untracked: .gitignore\n# untracked: new.py\n"


def test_a_detached_head_has_a_commit_and_no_branch(repository: Path) -> None:
    git(repository, "checkout", "-q", "--detach")
    found = found_in(repository)
    assert found.commit == git(repository, "rev-parse", "HEAD") and found.branch is None
    assert "mlflow.source.git.branch" not in environment(found)


def test_a_diff_that_takes_too_long_is_not_taken_for_a_clean_tree(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        if "diff" in command:
            raise subprocess.TimeoutExpired(command, 5)
        return real(command, **options)

    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", run)
    found = found_in(repository)
    assert "could not say" in str(found.diff) and environment(found)["rankzero.dirty"] == "true"


def test_a_large_diff_is_cut_at_a_line(repository: Path) -> None:
    (repository / "a.py").write_text(f"x = 1\n{'y = 2' * 20}\n" * 20_000)
    for number in range(300):
        (repository / f"new-{number:03}.py").touch()
    lines = str(found_in(repository).diff).splitlines()
    assert lines[200] == "# untracked: 100 more" and lines[-1] == "# cut: the diff is larger"
    assert lines[-2] in ("+x = 1", f"+{'y = 2' * 20}")


def test_without_a_commit_or_a_repository_git_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert found_in(tmp_path).commit is None
    git(tmp_path, "init", "-q")
    assert found_in(tmp_path).commit is None
    monkeypatch.setenv("PATH", "")
    assert found_in(tmp_path).commit is None


def test_a_repositorys_settings_run_nothing(repository: Path) -> None:
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
def test_a_submodules_settings_run_nothing(repository: Path, how: str) -> None:
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
        and "z = 2" not in moved
        and not (repository / "executed").exists()
    )
    git(repository, "-c", "core.fsmonitor=false", "commit", "-q", "-m", "third", "inner")
    (repository / "executed").unlink(missing_ok=True)
    assert "inner" in changed_between(repository, first, "HEAD")
    found_in(repository)
    assert not (repository / "executed").exists()


def test_objects_that_are_missing_are_not_fetched(repository: Path) -> None:
    """Of a partial clone, git would fetch them in the middle of a diff, by a program that the repository names."""
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
    assert "could not say" in str(found_in(repository).diff)
    assert not (repository / "executed").exists()


def test_packages_are_listed(tmp_path: Path) -> None:
    write_packages(tmp_path)
    lines = (tmp_path / "provenance" / "packages.txt").read_text().splitlines()
    assert any(line.startswith("torch==") for line in lines) and len(lines) > 20


def test_only_listed_variables_are_kept() -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "NCCL_AUTH_TOKEN": "x",
    }
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
    "text",
    [
        "tokenizer=gpt2",
        "max_tokens=512",
        "author = me",
        "lr=1e-3",
        "train.batch_size=3",
        "keyboard: x",
    ],
)
def test_harmless_words_survive(text: str) -> None:
    assert text_without_secrets(text) == text


@pytest.mark.parametrize(
    "text", ["pad_token_id=0", "eos_token: 50256,", "use_auth_token=True", "token = None"]
)
def test_numbers_and_switches_are_no_secrets(text: str) -> None:
    assert text_without_secrets(text) == text


places = st.sampled_from(
    [
        "password={}",
        "--api-key={}",
        "HF_TOKEN: '{}'",
        '"secret": "{}"',
        "https://user:{}@host/x",
        "db_passwd = {}",
        "aws_secret_access_key={}",
        "auth={}",
        "client_secret:{}",
        "+password: str = '{}'",
        "Authorization: Basic {}",
        'os.environ["HF_TOKEN"] = "{}"',
        'login("me", "password", "{}")',
        "password: correct horse {} staple",
        "curl --auth-token {} https://host",
        'mysql --password "correct {}" -h x',
        "x --token 'correct {}'",
        "<password>{}</password>",
        'password = "begins" "{}"',
        "DB_PASS={}",
        'api_key = (\n+    "{}"\n+)',
        "secret: |\n  {}",
        'token == "{}"',
        "MYSQL_PWD={}",
        "AccountKey={};x=1",
        "authKey: {}",
        'PASSWORD = """\n{}\n"""',
        "https://store/blob?sv=1&sig={}",
        'key = {{"accessToken" : "{}"}}',
        "Cookie: session={}",
        "postgresql+psycopg2://me:{}@host:5432/db",
        r'"password": "a\"{}"',
        "oauth2_token={}",
        r'"os.environ[\"WANDB_API_KEY\"] = \"{}\"\n",',
        r"{{\"password\": \"{}\", \"x\": 1}}",
        r"{{\\\"password\\\":\\\"{}\\\"}}",
        r"login(\"me\", \"password\", \"{}\")",
        "&quot;password&quot;: &quot;{}&quot;",
        "PASSWORD ?= {}",
        "PASSWORD += {}",
        "password:\n  {}",
        "passwords:\n  - a\n  - {}",
        "passwords:\n- a\n- {}",
        "credentials:\n  prod: x\n\n  dev: {}",
        '"password":\n "{}"',
        "+password:\n+  {}",
        " credentials:\n-  prod: {}",
        "- password:\n    {}",
        "password: |\n  a\n  {}",
        "password:  # ours\n  {}",
        "password: !vault |\n  a\n  {}",
        'password: "begins\n  {}"',
        "<password>\n  {}\n</password>",
        'password = ("begins"\n "{}")',
        'password = "a)" \\\n "{}"',
        "PASSWORD=begins\\\n{}",
        'f(password="begins"\n  "{}")',
        'api_key = get("x",\n    "{}",\n)',
        'token = get(\n    "{}",\n)',
        'credentials = {{\n "a": {{\n  1: 2\n }},\n "b": "{}"\n}}',
        'const accessToken =\n    "{}";',
        'password = f"""begins\n{}"""',
        "password = [\n    '(', {!r}\n]",
        "https://hooks.slack.com/services/T0/B0/{}",
        "pass: {}",
        '{{"pass": "{}"}}',
        "REDIS_PASS={}",
        "&pass={}",
        "wifi-pass={}",
        "machine h login u password {}",
        "machine h\n  login u\n  password {}",
        "default login u password {}",
        "+login u\n+password {}",
        "ENV DB_PASSWORD {}",
        "+ENV X_API_KEY correct {}",
        "setenv MY_TOKEN {}",
    ]
)
secrets = st.text(
    "".join(chr(code) for code in range(33, 127) if chr(code) not in "\"'\\<>&"),
    min_size=12,
    max_size=40,
)
plain = st.text("abcXYZ0189", min_size=12, max_size=40)
harmless = st.text("éü =:([,\n", max_size=20)


@settings(max_examples=500)
@given(places, secrets, harmless, harmless)
def test_a_planted_secret_does_not_survive(
    place: str, secret: str, before: str, after: str
) -> None:
    assert secret not in text_without_secrets(f"{before}\n{place.format(secret)}\n{after}")


@pytest.mark.parametrize(
    "text",
    [
        "password = 123456",
        "{'password': 123456}",
        "REDIS_PASS=123456",
        "db.password=1234",
        "my_secret: -1,",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n123456\n-----END PGP PRIVATE KEY BLOCK-----",
        "pass: 123456",
    ],
)
def test_a_number_is_a_secret_where_the_name_is_a_passwords(text: str) -> None:
    assert not re.search(r"\d", text_without_secrets(text))


@given(st.sampled_from(["://", "%3A%2F%2F", "%3a%2f%2f", ":%2F%2F", "%253A%252F%252F"]), plain)
def test_an_encoded_url_loses_its_credentials(scheme: str, secret: str) -> None:
    percent = "%25" if "25" in scheme else "%"
    for userinfo in (f"me{percent}3A{secret}{percent}40", f"{secret}{percent}40"):
        kept = url_without_secrets(
            f"x?uri=postgresql{scheme.replace('://', ':%2F%2F')}{userinfo}host&y=1"
        )
        assert secret not in kept and kept.endswith("host&y=1")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (r"{\"password\": \"x\", \"user\": \"me\"}", r"{\"password\": [secret], \"user\": \"me\"}"),
        ("password:\n  x\nuser: me\n", "password:[secret]\nuser: me\n"),
        ("+password:\n+  x\n user: me\n", "+password:[secret]\n user: me\n"),
        ("-passwords:\n-  - x\n@@ -1 +1 @@\n", "-passwords:[secret]\n@@ -1 +1 @@\n"),
        ("password = f(\n    x,\n)\ny = 1\n", "password = [secret]\n)\ny = 1\n"),
        ("password = (\n@@ -1 +1 @@\n", "password = [secret]\n@@ -1 +1 @@\n"),
        (
            "token_embedding = Embedding(\n    size,\n)\n",
            "token_embedding = [secret]\n    size,\n)\n",
        ),
        ("onPassword = (e) => {\n  body()\n}\n", "onPassword = [secret]\n  body()\n}\n"),
        (
            "docker run -e PASSWORD=x \\\n  -e A=y image\n",
            "docker run -e PASSWORD=[secret]\n  -e A=y image\n",
        ),
        ("password:\n" + "  x\n" * 30, "password:[secret]\n" + "  x\n" * 10),
    ],
)
def test_what_is_around_a_secret_is_kept(text: str, kept: str) -> None:
    assert text_without_secrets(text) == kept


@pytest.mark.parametrize(
    "text",
    [
        "bypass=x",
        "passes=3",
        "pass_through=1",
        "pass: 12, fail: 3",
        "PASS: test_x",
        '{"result": "pass", "n": 3}',
        "forward_pass = model(x)",
        "first pass: loss 0.3",
        "key=3",
        "sort_key=name",
        "password_length=8",
        "secrets.py:12 x",
        "if token:\n    x = 1",
        'if name == "password":\n    x = 1',
        "class Token:\n    x = 1",
        "usage: <token>\n    more",
        "with self.auth:\n    x = 1",
        "password required",
        "login with password failed",
        'f("password",\n    "email")',
        "https%3A%2F%2Fhost%2Fpath%3Femail%3Da%40b",
        "token:\nx = 1",
        "size mismatch for embed.token_embedding.weight: copying a param",
        "cls_token.bias: shape [3]",
    ],
)
def test_what_reads_as_a_secret_and_is_none_is_left_alone(text: str) -> None:
    assert text_without_secrets(text) == text


@given(
    st.text(st.characters(categories=("Lu", "Ll", "Nd")), max_size=9).map(
        lambda word: f"the {word} is\n\tx = 1,"
    )
)
def test_what_holds_no_secret_is_left_alone(text: str) -> None:
    assert text_without_secrets(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "a.",
        "a-",
        "token",
        "token ",
        "-eyJ",
        "://",
        "--",
        "secret='",
        "auth(",
        "://a:",
        "auth:\n",
        "auth=(\n",
        "auth:\n ",
        "password=\\\n",
        "password='\n",
        'auth=\\"',
        "auth\\",
        "pass",
        "pass ",
        '\\\\"',
        'password=("',
        "password=(\n" + "([" * 500,
        'password=x"' + '\\"' * 900 + "\n",
        'password="a"\n"b"\n',
        "%3A%2F%2F",
        "%3A%2F%2Fa%3A",
        "machine a ",
        "login a\n",
        "password ",
        "ENV ",
        "\nENV password",
        "SG." + "a" * 30,
        "hooks.slack.com/services/",
    ],
)
def test_a_line_of_a_megabyte_takes_a_moment(piece: str) -> None:
    start = time.process_time()
    text_without_secrets(piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 15


@pytest.mark.parametrize(
    "shape",
    [
        TOKEN,
        "AKIA" + "A1B2C3D4" * 2,
        "hf_" + "a" * 30,
        "sk-" + "b" * 30,
        "SG." + "a" * 22 + "." + "b" * 43,
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nabc\n-----END PGP PRIVATE KEY BLOCK-----",
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_what_is_shaped_like_a_secret_does_not_survive(shape: str) -> None:
    assert shape not in text_without_secrets(f"x = f({shape!r}) {shape}")
    assert "[secret]" in text_without_secrets(shape)


@pytest.mark.parametrize(
    "value", ["'x'\"'\"'hunter2'", '""hunter2', '"abc"hunter2', "'hunter2", '"a hunter2" b']
)
def test_an_options_quoted_value_does_not_survive(value: str) -> None:
    assert "hunter2" not in text_without_secrets(f"mysql --password {value} -h x")


@given(st.sampled_from(["--token", "--api-key", "--wandb-password"]), secrets)
def test_an_options_value_does_not_survive(option: str, secret: str) -> None:
    assert secret not in command_without_secrets(["train", option, secret, "lr=1"])
    assert secret not in command_without_secrets(["train", f"{option}={secret}"])


def test_a_settings_number_is_kept_where_its_name_is_no_passwords() -> None:
    harmless = {
        "model.pad_token_id": "0",
        "model.token_dropout": "0.1",
        "mask_token_prob": "0.15",
        "token_lr": "1.5e-4",
    }
    assert settings_without_secrets(harmless) == harmless
    hidden = settings_without_secrets(
        {"db.password": "12345", "hf_token": "abc1", "auth": "1234567", "token": "0.1x"}
    )
    assert set(hidden.values()) == {"[secret]"}


@pytest.mark.parametrize(
    "value", ["True love never dies", "none of your business", "0 hunter2", "1\nhunter2", "12 x"]
)
@pytest.mark.parametrize("name", ["password", "token", "auth", "pass", "db.password"])
def test_a_settings_value_is_secret_as_a_whole(name: str, value: str) -> None:
    assert settings_without_secrets({name: value}) == {name: "[secret]"}
    assert command_without_secrets([f"{name}={value}"]) == f"'{name}=[secret]'"


def test_a_settings_value_does_not_survive_in_the_command() -> None:
    argv = [
        "train",
        "e.py",
        "db.password=abc\nhunter2",
        "+x.password=123456",
        "pad_token_id=0",
        "max_tokens=512",
    ]
    kept = "train e.py 'db.password=[secret]' '+x.password=[secret]' pad_token_id=0 max_tokens=512"
    assert command_without_secrets(argv) == kept


def test_a_secret_does_not_survive_wherever_it_is_planted(repository: Path, tmp_path: Path) -> None:
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


def test_settings_lose_what_is_secret_by_name_or_shape() -> None:
    settings = {"lr": "0.1", "hub.api_key": "abc", "note": TOKEN, "train.max_tokens": "512"}
    kept = settings_without_secrets(settings)
    assert kept == {
        "lr": "0.1",
        "hub.api_key": "[secret]",
        "note": "[secret]",
        "train.max_tokens": "512",
    }


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_packages(tmp_path / "moved away" / "artifacts")
    assert not (tmp_path / "moved away").exists()


def test_a_secret_is_not_cut_in_two_before_it_is_looked_for() -> None:
    text = "x" * 470 + " postgresql://user:hunter2hunter2@host/db"
    assert "hunter2" in text_without_secrets(text[:500]), "half of it looks like nothing"
    told = line_without_secrets(text)
    assert "hunter2" not in told and len(told) <= 500
    progress = DeliveryState()
    progress.reject("x", text)
    assert "x" * 470 in progress.reasons[0] and "hunter2" not in progress.reasons[0]

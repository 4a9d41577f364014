"""The wheel: what users install, in an environment and a folder that know nothing of this one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import free_port
from support.paths import ROOT

OWN = f"3.{sys.version_info.minor}"
OTHERS = [version for version in ("3.11", "3.12", "3.13", "3.14") if version != OWN]
UV = Path(sys.executable).with_name("uv")


def _run(*words: object, cwd: Path) -> str:
    # The machine's package index stays. These would lead back to this environment.
    foreign = ("PYTHON", "RANKZERO_", "MLFLOW_", "VIRTUAL_ENV")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _python(version: str) -> str | None:
    """Return a Python of that version that runs: a shim of pyenv may have none behind it."""
    folders = os.environ["PATH"].split(os.pathsep)
    found = (shutil.which(f"python{version}", path=folder) for folder in folders)
    return next((one for one in found if one and _runs(one)), None)


def _runs(python: str) -> bool:
    return subprocess.run([python, "-c", "pass"], capture_output=True, check=False).returncode == 0


def _share_bytecode(environment: Path) -> None:
    """Give the environment the compiled files of this one. Compiling them takes half a minute.

    uv links both environments to the same files, so Python takes them as compiled from these.
    """
    ours = Path(sysconfig.get_path("purelib"))
    theirs = environment / ours.relative_to(sys.prefix)
    for compiled in ours.rglob("__pycache__"):
        target = theirs / compiled.relative_to(ours)
        if target.parent.is_dir():
            shutil.copytree(compiled, target, copy_function=os.link, dirs_exist_ok=True)


def test_shim_without_a_python_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in (("shims", 127), ("bin", 0)):
        (tmp_path / name).mkdir()
        program = tmp_path / name / "python3.99"
        program.write_text(f"#!/bin/sh\nexit {code}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/shims")
    assert _python("3.99") is None
    monkeypatch.setenv("PATH", f"{tmp_path}/shims{os.pathsep}{tmp_path}/bin")
    assert _python("3.99") == f"{tmp_path}/bin/python3.99"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Of what git has: a file that it lacks must not make this work.
    _run("git", "clone", "--quiet", ROOT, folder / "clone", cwd=folder)
    _run(UV, "--quiet", "build", "--wheel", "--out-dir", folder, folder / "clone", cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture
def environment() -> Iterator[Path]:
    """Return where to make an environment, next to this one: there, uv links instead of copying."""
    with tempfile.TemporaryDirectory(prefix=".venv-wheel-", dir=ROOT) as folder:
        yield Path(folder) / "environment"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", [OWN, *OTHERS])
def test_installed_wheel_trains_and_shows_a_new_experiment(
    version: str, wheel: Path, environment: Path, tmp_path: Path
) -> None:
    python = sys.executable if version == OWN else _python(version)
    if python is None:
        pytest.skip(f"this machine has no python{version}")
    folder = tmp_path / "empty folder"
    folder.mkdir()
    # The lock's versions, because installing them takes seconds.
    locked = re.findall(r"^[a-z][^ ]*==[^\\\n]+", (ROOT / "requirements.lock").read_text(), re.M)
    (tmp_path / "constraints.txt").write_text("\n".join(locked))
    _run(UV, "--quiet", "venv", "--python", python, environment, cwd=tmp_path)
    target = ("--python", environment, "--constraint", tmp_path / "constraints.txt")
    _run(UV, "--quiet", "pip", "install", *target, wheel, cwd=tmp_path)
    if version == OWN:
        _share_bytecode(environment)
    rankzero = environment / "bin" / "rankzero"

    _run(rankzero, "init", "my_experiment.py", cwd=folder)
    settings = "train.steps=2", "train.mlflow.log_model=false"
    assert "FINISHED" in _run(rankzero, "train", "my_experiment.py", *settings, cwd=folder)
    assert "FINISHED" in _run(rankzero, "runs", cwd=folder)
    with subprocess.Popen(
        [rankzero, "ui", "--port", str(free_port())], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            address = next(
                line.split(": ")[1].split()[0] for line in server.stdout if "MLflow UI" in line
            )
            with urllib.request.urlopen(f"{address}/health", timeout=30) as answer:
                assert answer.read() == b"OK"
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 0

"""Shell completion: the candidates, and a press of TAB in a real bash."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankzero.cli.completion import candidates
from rankzero.cli.main import main
from rankzero.cli.verbs import VERBS

MINE = """
from dataclasses import dataclass
from typing import Literal
from rankzero import Experiment, Train

@dataclass(frozen=True)
class Model:
    depth: int = 2
    norm: Literal["batch", "layer"] = "batch"

class Mine(Experiment):
    train: Train = Train(epochs=2)
    net: Model = Model()
    data_: str = "here"
    augment: bool = False
    act: Literal["relu", "gelu"] | None = None
    seed: int | None = None
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "notes.txt").touch()
    for name in ("digits-1", "digits-2"):
        path = tmp_path / "mlruns/runs" / name
        path.mkdir(parents=True)
        (path / "run.json").write_text(json.dumps({"experiment_file": str(tmp_path / "mine.py")}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("rankzero re", ["register", "relocate", "repeat", "report", "resume"]),
        ("rankzero train ", ["mine.py", "mlruns/"]),
        ("rankzero train mi", ["mine.py"]),
        ("rankzero train mine.py --nn", ["--nnodes"]),
        ("rankzero train mine.py net.", ["net.depth=", "net.norm="]),
        ("rankzero train --nproc 2 mine.py da", ["data="]),
        ("rankzero train mine.py net.norm=", ["net.norm=batch", "net.norm=layer"]),
        ("rankzero train mine.py augment=t", ["augment=true"]),
        ("rankzero train mine.py act=", ["act=gelu", "act=none", "act=relu"]),
        ("rankzero train mine.py seed=", []),
        ("rankzero search mine.py --like digits-", ["digits-1", "digits-2"]),
        ("rankzero train mine.py train.precision=b", ["train.precision=bf16"]),
        ("rankzero train mine.py --from digits-", ["digits-1", "digits-2"]),
        ("rankzero resume digits-1 net.d", ["net.depth="]),
        ("rankzero report digits-1 di", ["digits-1", "digits-2"]),
        ("rankzero logs ", ["digits-1", "digits-2"]),
        ("rankzero logs digits-1 ", []),
        ("rankzero search mine.py --sampler ", ["gp", "grid", "random", "tpe"]),
        ("rankzero runs st", ["started=", "status="]),
        ("rankzero completion z", ["zsh"]),
        ("rankzero nothing ", []),
        ("rankzero train no/such/", []),
    ],
)
def test_candidates(folder: Path, line: str, found: list[str]) -> None:
    assert candidates(line, Path("mlruns")) == found


def test_settings_are_read_without_running_the_file(folder: Path) -> None:
    source = "raise SystemExit\nclass A(Experiment):\n    width: int = 3\n"
    for text, found in {source: ["width="], "not python (": []}.items():
        (folder / "mine.py").write_text(text)
        assert candidates("rankzero train mine.py wid", folder / "mlruns") == found


def test_help_fits_60_columns_without_a_broken_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def words(*verb: str, columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit):
            main([*verb, "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= columns, max(lines, key=len)
        return " ".join(line.removesuffix(" \\") for line in lines).split()

    for verb in ((), *((verb,) for verb in VERBS)):
        assert words(*verb, columns=60) == words(*verb, columns=200), verb


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_ends_with_its_example(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    output = capsys.readouterr().out
    assert end.value.code == 0 and output.rstrip().endswith(f"example:\n  {VERBS[verb].example}")
    assert VERBS[verb].example.split("rankzero ")[1].startswith(verb)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "rankzero" in capsys.readouterr().out


def test_completion_needs_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 2 and "bash, zsh or fish" in capsys.readouterr().err


def test_tab_in_a_real_bash(folder: Path) -> None:
    with bash(folder) as keyboard:
        keyboard.type('eval "$(rankzero completion bash)"\n')
        keyboard.type("rankzero tra\t", until="rankzero train ")
        keyboard.type("mi\t", until="mine.py ")
        keyboard.type("train.prec\t", until="train.precision=")
        keyboard.type("bf\t", until="bf16 ")
        keyboard.type("net.no\t", until="net.norm=")
        keyboard.type("l\t", until="layer ")
        keyboard.type("--max\t", until="--max-restarts ")


class Keyboard:
    """Types into a terminal and waits for what is shown."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal

    def type(self, keys: str, until: str = "$ ") -> None:
        os.write(self._terminal, keys.encode())
        shown, deadline = "", time.monotonic() + 30
        while until not in shown.replace("\x07", ""):
            assert time.monotonic() < deadline, f"{keys!r} showed {shown!r}, not {until!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                shown += os.read(self._terminal, 65536).decode(errors="replace")


@contextlib.contextmanager
def bash(folder: Path) -> Iterator[Keyboard]:
    """An interactive bash in `folder` that finds `rankzero`."""
    (folder / "bin").mkdir()
    (folder / "bin/rankzero").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rankzero "$@"\n')
    (folder / "bin/rankzero").chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "PS1": "$ ",
        "TERM": "dumb",
    }
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environ)  # noqa: S606
    keyboard = Keyboard(terminal)
    keyboard.type("bind 'set bell-style none'\n")
    try:
        yield keyboard
    finally:
        os.kill(child, 9)
        os.close(terminal)
        os.waitpid(child, 0)

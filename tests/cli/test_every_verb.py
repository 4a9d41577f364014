"""Every verb on narrow and wide terminals and into a pipe, with the real command.

Its current folder is not the project's, and both have names with spaces and umlauts. On one
terminal the locale is C, and on another NO_COLOR is set.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from rankzero.cli.verbs import VERBS
from support.commands import SECONDS, Command, command_in, free_port
from support.paths import FIXTURES

pytestmark = pytest.mark.slow


class Surface(NamedTuple):
    """What a command prints on."""

    columns: int | None
    """None: a pipe."""
    environ: dict[str, str]


SURFACES = {
    "60 columns, LC_ALL=C": Surface(60, {"LC_ALL": "C", "LANG": "C"}),
    "80 columns, NO_COLOR": Surface(80, {"NO_COLOR": "1"}),
    "200 columns": Surface(200, {}),
    "pipe": Surface(None, {}),
}
EXPERIMENT = "{project}/ein Versuch für Größen.py"
SHORT = ("train.steps=6", "--nproc", "1")
WORDS: dict[str, list[str]] = {
    "init": ["init", "{here}/neu_{n}.py"],
    "train": ["train", EXPERIMENT, *SHORT, "--name", "train-{n}", "--note", "größer"],
    "submit": ["submit", "--kubernetes", EXPERIMENT, "--image", "r.example/t:1", "--claim", "runs"],
    "resume": ["resume", "short-{n}", "train.epochs=2", "train.steps=none"],
    "search": [
        *("search", EXPERIMENT, *SHORT, "--trials", "2", "--no-probe", "--seeds", "2"),
        *("--name", "search-{n}"),
    ],
    "repeat": ["repeat", EXPERIMENT, *SHORT, "--seeds", "2", "--name", "repeat-{n}"],
    "probe": ["probe", EXPERIMENT, "--nproc", "1", "--name", "probe-{n}"],
    "compare": [
        *("compare", EXPERIMENT, "--strategies", "single,ddp", "--nproc", "1", "train.steps=6"),
        *("--name", "compare-{n}"),
    ],
    "profile": ["profile", EXPERIMENT, "--nproc", "1", "train.steps=6", "--name", "profile-{n}"],
    "config": ["config", EXPERIMENT, "lr=0.2"],
    "runs": ["runs", "--sort", "lr"],
    "report": ["report", "short-0", "short-1"],
    "delete": ["delete", "gone-{n}", "--yes"],
    "prune": ["prune", "--keep-best", "1", "--dry-run"],
    "logs": ["logs", "short-{n}"],
    "export": ["export", "short-{n}", "--to", "{here}/Tabellen {n}"],
    "import": ["import", "{project}/ein Lauf.zip", "--dir", "{here}/andere Läufe {n}"],
    "copy": ["copy", "short-{n}", "--to", "sqlite:///{here}/Kopie {n}.db"],
    "relocate": ["relocate"],
    "register": ["register", "short-0", "größe_{n}"],
    "ui": ["ui", "--port", "{port}", "--no-open"],
    "sync": ["sync"],
    "doctor": ["doctor", "short-{n}"],
    "completion": ["completion", "bash"],
}
STYLES = re.compile(r"\x1b\[[0-9;]*m")
COLOURS = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
OTHER_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b\][^\x07]*\x07")


class Printed(NamedTuple):
    """What a command did on a surface."""

    code: int
    text: str


class Project(NamedTuple):
    """A folder with runs, and another one in which the commands run."""

    folder: Path
    here: Path
    environ: dict[str, str]

    def run(self, words: list[str], surface: Surface) -> Printed:
        """Run a command on a surface. `ui` is stopped once it serves."""
        environ = {**self.environ, "TERM": "xterm-256color", **surface.environ}
        environ.pop("COLUMNS", None)
        reader, writer = os.pipe() if surface.columns is None else pty.openpty()
        if surface.columns is not None:
            size = struct.pack("HHHH", 50, surface.columns, 0, 0)
            fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
        process = subprocess.Popen(
            [sys.executable, "-m", "rankzero", *words],
            cwd=self.here,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            start_new_session=True,
        )
        os.close(writer)
        output = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(reader, 1 << 16):
                output += chunk
                if words[0] == "ui" and b"Ctrl-C" in output:
                    process.send_signal(signal.SIGINT)
        os.close(reader)
        code = process.wait(timeout=SECONDS)
        return Printed(code, output.decode().replace("\r\n", "\n"))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, new_store: Path) -> Iterator[Project]:
    """A project with delivered runs: two for each surface, the first with a model."""
    folder = tmp_path_factory.mktemp("Läufe aus Köln")
    here = tmp_path_factory.mktemp("ganz woanders, übrigens")
    with command_in(folder, new_store) as rankzero:
        file = Path(EXPERIMENT.format(project=folder))
        file.write_text((FIXTURES / "tiny.py").read_text())
        for number in range(len(SURFACES)):
            for name in ("short", "gone"):
                words = ("train", file, *SHORT, "--name", f"{name}-{number}", "--offline")
                model = f"train.mlflow.log_model={str(name == 'short').lower()}"
                rankzero.succeed(*words, model, f"lr=0.{number + 1}")
        _deliver(rankzero, folder)
        environ = {**rankzero.environ, "RANKZERO_DIR": str(folder / "mlruns")}
        yield Project(folder, here, environ)


def _deliver(rankzero: Command, folder: Path) -> None:
    for words in (("sync",), ("export", "gone-0", "--bundle", folder / "ein Lauf.zip")):
        # A warm process would fork the one that logs the best model after it has opened the store.
        rankzero.succeed(*words, cold=True)


def test_every_verb_is_tried() -> None:
    assert list(WORDS) == list(VERBS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", WORDS)
def test_verb_prints_for_its_terminal(verb: str, project: Project) -> None:
    def run(number: int, surface: Surface) -> Printed:
        names = {"project": project.folder, "here": project.here, "port": free_port()}
        words = [word.format(n=number, **names) for word in WORDS[verb]]
        return project.run(words, surface)

    with ThreadPoolExecutor(2) as pool:
        found = dict(
            zip(SURFACES, pool.map(run, range(len(SURFACES)), SURFACES.values()), strict=True)
        )
    for name, printed in found.items():
        surface, text = SURFACES[name], printed.text
        assert printed.code == 0, (name, text)
        assert text.strip() and "Traceback" not in text, (name, text)
        if surface.columns is None:
            assert "\x1b" not in text and "\r" not in text, (name, text)
            continue
        assert "NO_COLOR" not in surface.environ or not COLOURS.search(text), (name, text)
        plain = OTHER_CODES.sub("", STYLES.sub("", text))
        tables = [line for line in re.split(r"[\r\n]", plain) if re.match(r"[│┃┌┏├└╭╰|+]", line)]
        assert max(map(len, tables), default=0) <= surface.columns, (name, tables)

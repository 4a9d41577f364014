"""The server that workers are forked from is a fork of the command wherever that is safe."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rankzero.errors import UserError
from rankzero.launch import fork_server
from rankzero.tuning.trials.describe import Question
from rankzero.tuning.trials.host_process import LocalHost
from support.commands import TINY, Command

# The name and process of each import, in one write: unbuffered, print() makes four of these words.
MODULE = r"import os; os.write(1, f'{__name__} {os.getpid()}\n'.encode())"
COMMAND = """
import multiprocessing, os, psutil, signal, sys, threading
from rankzero.launch import fork_server

def nested():
    print("nested", psutil.Process(os.getppid()).cmdline()[-1].split(";")[0], flush=True)

def work():
    held = opened & {{os.path.realpath(f"/proc/self/fd/{{one}}") for one in range(256)}}
    print("worker", os.getppid(), *(signal.getsignal(one) for one in signals), held, flush=True)
    inner = multiprocessing.get_context("forkserver").Process(target=nested)
    inner.start()
    inner.join()

def handler(*_):
    pass

opened = set()
signals = signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT
if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    opened |= {{os.path.realpath(f"/proc/self/fd/{{one}}") for one in os.pipe()}}
    print("command", os.getpid())
    {before}
    fork_server.start(("shared", "absent"), ("alone", "absent.too"))
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.write(1, f"server {{server}}\\n".encode())
    worker = multiprocessing.get_context("forkserver").Process(target=work)
    worker.start()
    worker.join()
    {after}
"""


def run(folder: Path, before: str = "pass", after: str = "pass") -> list[list[str]]:
    """Return the words of each line that the command, its server and a worker print."""
    for name in ("shared", "alone"):
        (folder / f"{name}.py").write_text(MODULE)
    program = folder / "command.py"
    program.write_text(COMMAND.format(before=before, after=after))
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    words = [sys.executable, str(program)]
    done = subprocess.run(
        words, check=True, env=environ, capture_output=True, text=True, timeout=120
    )
    assert not done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_a_fork_has_what_the_command_imported(tmp_path: Path) -> None:
    lines = run(tmp_path)
    said = {words[0]: words[1:] for words in lines}
    assert len(lines) == len(said) == 6, "each line is written once"
    assert said["shared"] == said["command"]
    assert said["alone"] == said["server"] and said["server"] != said["command"]
    # As in a new program: handlers are Python's own, ignored signals are ignored, no other file.
    assert said["worker"][0] == said["server"][0]
    # A worker's own server is a new program: the worker may have threads, and use a GPU.
    assert " ".join(said["nested"]) == "from multiprocessing.forkserver import main"
    handlers = " ".join(said["worker"][1:])
    assert handlers == "0 1 <built-in function default_int_handler> set()"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("end = threading.Event(); threading.Thread(target=end.wait).start()", "end.set()"),
        ("import torch", "pass"),
    ],
    ids=["a thread runs", "PyTorch may have computed"],
)
def test_the_server_is_a_new_program_where_a_fork_may_hang(
    tmp_path: Path, before: str, after: str
) -> None:
    lines = run(tmp_path, before, after)
    (server,) = [words[1] for words in lines if words[0] == "server"]
    assert ["shared", server] in lines and ["alone", server] in lines


SERVER = """
import os, signal, sys
from multiprocessing import forkserver, resource_tracker
from rankzero.launch import fork_server
{start}
helpers = resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid
for helper in helpers:
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        os.kill(helper, number)
for helper in helpers:
    os.kill(helper, signal.SIGSTOP)
    _, status = os.waitpid(helper, os.WUNTRACED)
    print(os.WIFSTOPPED(status), flush=True)
    os.kill(helper, signal.SIGCONT)
"""


@pytest.mark.parametrize("start", ["fork_server.start()", "fork_server.ensure_running()"])
def test_a_scheduler_that_signals_all_processes_ends_no_helper_of_multiprocessing(
    start: str,
) -> None:
    """As Slurm's ``--signal=USR1@120`` does, to every process of a step."""
    words = [sys.executable, "-c", SERVER.format(start=start)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", "True"] and not done.stderr


def test_a_server_that_has_imported_triton_ends_without_its_report() -> None:
    pytest.importorskip("triton")
    program = "import triton._C.libtriton, rankzero.launch.server_imports_end"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert not done.stderr


def test_a_temporary_folder_with_a_long_path_fails_no_run_and_no_trial(
    rankzero: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := rankzero.folder / ("x" * 90)).mkdir()
    rankzero.environ["TMPDIR"] = str(long)
    words = ("train", TINY, "train.steps=6", "train.workers=1", "--offline")
    code, output = rankzero(*words, cold=True)
    assert code == 0 and "FINISHED" in output, output
    monkeypatch.setenv("TMPDIR", str(long))
    with contextlib.closing(LocalHost(())) as host:
        assert host.describe(Question(str(TINY), {}, 1)).name == "Tiny"


def test_without_a_short_temporary_folder_the_error_names_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("x" * 90)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(fork_server.util, "get_temp_dir", (tmp_path / "gone").stat)
    with pytest.raises(UserError, match="too long for the paths of sockets: set TMPDIR to a"):
        fork_server._fit_sockets()
    assert tempfile.gettempdir() == str(long)

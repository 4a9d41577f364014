"""The server that workers are forked from ends with its command, however early that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

COMMAND = """
import multiprocessing, sys
from rankzero.launch import agent
agent.warm_up((), ["slow_to_import"])
print(multiprocessing.forkserver._forkserver._forkserver_pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("when", "number"),
    [
        ("at once", None),
        ("at once", signal.SIGHUP),
        ("while it imports", None),
        ("while it imports", signal.SIGTERM),
        ("while it imports", signal.SIGKILL),
    ],
)
def test_the_end_of_a_command_ends_its_server(
    tmp_path: Path, when: str, number: signal.Signals | None
) -> None:
    importing = tmp_path / "importing"
    module = f"import pathlib, time; pathlib.Path({str(importing)!r}).touch(); time.sleep(60)"
    (tmp_path / "slow_to_import.py").write_text(module)
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None and command.stdin is not None
        server = psutil.Process(int(command.stdout.readline()))
        until = time.monotonic() + 60
        while when == "while it imports" and not importing.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        if number is None:
            command.stdin.close()
        else:
            command.send_signal(number)
        assert command.wait(60) == -(number or 0)
        # A container's first process may leave it as a zombie.
        until = time.monotonic() + 20
        while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.01)


LAUNCHER = """
import multiprocessing, pathlib, signal, time
from rankzero.launch import agent, parent_death

def work(done: str) -> None:
    parent_death.end_with_parent()  # as a rank does
    print("works", flush=True)
    multiprocessing.parent_process().join()
    time.sleep(1)
    pathlib.Path(done).touch()

if __name__ == "__main__":
    agent.warm_up()
    multiprocessing.get_context("forkserver").Process(target=work, args=({done!r},)).start()
    signal.pause()
"""


def test_a_worker_of_a_killed_command_may_finish_its_work(tmp_path: Path) -> None:
    done, program = tmp_path / "done", tmp_path / "launcher.py"
    program.write_text(LAUNCHER.format(done=str(done)))
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None and command.stdout.readline() == "works\n"
        command.kill()
        command.stdout.read()  # to the end of the last process that may write
    assert done.exists()

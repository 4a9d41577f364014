"""Runs commands in forks of one process that has PyTorch and the package loaded.

    python warm_server.py SOCKET

A cold `python -m rankzero train` spends two seconds of processor time on importing PyTorch. A fork
of this process spends none. Each command gets the folder, environment, output and signals that it
would have in a process of its own.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from typing import Any

import torch._dynamo  # noqa: F401

import rankzero.cli.launch_run  # noqa: F401
import rankzero.launch.agent  # noqa: F401
import rankzero.training.worker  # noqa: F401
from rankzero.launch import fork_server

_WAIT_SECONDS = 5.0


def serve(path: str) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request. Return it and its output's descriptors, in the fork only."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the minders
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        # The tests' process may be killed, or leave without its exit handlers.
        parent = os.getppid()
        listener.settimeout(_WAIT_SECONDS)
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if os.getppid() != parent:
                    os._exit(0)
                continue
            message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
            if os.fork():
                connection.close()
                for descriptor in descriptors:
                    os.close(descriptor)
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            if command := os.fork():
                _mind(connection, command, descriptors)
            connection.close()
            return json.loads(message), descriptors


def _mind(connection: socket.socket, command: int, descriptors: list[int]) -> None:
    """Send the command's process id, and its exit status once it has ended."""
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(array.array("q", [command]).tobytes())
    _, status = os.waitpid(command, 0)
    connection.sendall(array.array("q", [os.waitstatus_to_exitcode(status)]).tobytes())
    os._exit(0)


def become(request: dict[str, Any], output: int) -> None:
    """Take on the command's session, folder, environment and standard streams."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "wb", closefd=False), encoding="utf-8")
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True
    )
    sys.argv = ["rankzero", *request["words"]]
    sys.path.insert(0, request["folder"])  # as `python -m` does


def run_to_the_end() -> None:
    """Run the command and exit as Python would, but leave PyTorch's memory to the kernel."""
    code: Any = 0
    try:
        runpy.run_module("rankzero", run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    asked, (out,) = serve(sys.argv[1])
    become(asked, out)
    with fork_server.forks_programs():
        run_to_the_end()

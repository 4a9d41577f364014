"""A process that stands for `subprocess.Popen`, forked from a server that has PyTorch loaded."""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.paths import SUPPORT

COLD = ("PYTHON", "LC_", "LANG", "LD_", "OMP_", "MALLOC_")
"""Prefixes of variables that a process reads only when it starts, so a fork cannot adopt them."""


class Warm:
    """Starts commands. One for all tests of a process: starting it takes as long as one command."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rankzero-warm-")
        self._path = Path(self._folder.name) / "socket"
        self._environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-P", str(SUPPORT / "warm_server.py"), str(self._path)]
        self._server = subprocess.Popen(words, env=self._environ, start_new_session=True)

    def can(self, environ: Mapping[str, str]) -> bool:
        """Return whether a fork would behave as a new process with this environment."""
        names = {*environ, *self._environ}
        return not any(
            name.startswith(COLD) and environ.get(name) != self._environ.get(name) for name in names
        )

    def start(self, words: Sequence[str], folder: Path, environ: Mapping[str, str]) -> WarmProcess:
        """Start ``rankzero WORDS`` in `folder`, in a session of its own."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        while True:
            try:
                connection.connect(str(self._path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if self._server.poll() is not None:
                    raise RuntimeError("the server of warm commands has ended") from None
                time.sleep(0.05)
        read, write = os.pipe()
        request = {"words": list(words), "folder": str(folder), "environ": dict(environ)}
        socket.send_fds(connection, [json.dumps(request).encode()], [write])
        os.close(write)
        return WarmProcess(words, connection, read)

    def close(self) -> None:
        """End the server. Commands that still run go on."""
        self._server.kill()
        self._server.wait()
        self._folder.cleanup()


class WarmProcess:
    """A started command: the part of `subprocess.Popen` that tests use."""

    def __init__(self, words: Sequence[str], connection: socket.socket, output: int) -> None:
        self.args = words
        self._connection = connection
        self.stdout = open(output, encoding="utf-8", errors="replace")  # noqa: SIM115
        self.returncode: int | None = None
        self.pid = self._number()

    def _number(self) -> int:
        return array.array("q", self._connection.recv(8, socket.MSG_WAITALL))[0]

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._number()
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return all that it printed once it has ended. Raises TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        found = []
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.stdout], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            piece = os.read(self.stdout.fileno(), 1 << 16)
            if not piece:
                break
            found.append(piece)
        self.stdout.close()
        self.wait(None if deadline is None else max(1.0, deadline - time.monotonic()))
        return b"".join(found).decode("utf-8", "replace"), None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

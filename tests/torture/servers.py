"""MLflow's server as a process that can be killed and restarted on the same port and store."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from rankzero.mlflow_store import server
from rankzero.mlflow_store.uris import DATABASE
from torture.ground import MARK, Broken, wait_for

START_SECONDS = 120.0


class Server:
    """A server on its own store, which runs in a with block. `empty`: the database to copy."""

    def __init__(self, root: Path, empty: Path) -> None:
        self._root, self._port = root, free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        root.mkdir(exist_ok=True)
        shutil.copy(empty, root / DATABASE)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it unless it runs, and wait for an answer. Raises Broken if none comes."""
        if self._process is None:
            environ = {name: value for name, value in os.environ.items() if name != MARK}
            self._process = subprocess.Popen(
                server.command(self._root, server.Access(self._port)),
                env=server.environment(environ),
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        if not wait_for(self.answers, START_SECONDS):
            raise Broken(f"error: MLflow's server does not answer on {self.uri}")

    def answers(self) -> bool:
        """Return whether it answers."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.uri}/health", timeout=1) as answer,
        ):
            return bool(answer.status == 200)
        time.sleep(0.1)
        return False

    def kill(self) -> None:
        """Send SIGKILL to it and its workers, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])

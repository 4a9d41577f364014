"""Hosts as actors of a Ray cluster: ``python -m rankzero.tuning.places.ray_actor``.

    search ── standard input and output ──▶ this program ── Ray ──▶ actor ── pipe ──▶ places.node

It does for Ray what `srun` does for Slurm. Ray places the actor, and ends it with this program.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero import config
from rankzero.errors import UserError

_CHUNK_BYTES = 1 << 20
_MOST_ERROR_BYTES = 2000
_CONNECT_SECONDS = 10.0
_THREADS = "OMP_NUM_THREADS"
# Ray gives the actor some of its machine's GPUs. Those of the search's machine are others.
_OF_ONE_MACHINE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# With another value the connection would hang, or the actor outlive the search.
_OWN = {"lifetime", "max_concurrency", "max_restarts", "name"}


def command(address: str, options: Sequence[str], processes: int) -> list[str]:
    """Return the command that starts a host. Raises UserError without Ray.

    `options`: of the actor, such as ``num_cpus=4``. `processes`: of each trial; an actor has a
    processor for each by default, and a GPU where the cluster has some.
    """
    if taken := sorted(_OWN & config.parse_assignments(options).keys()):
        raise UserError(f"{taken[0]} of the actors is RankZero's own choice: leave it out")
    if importlib.util.find_spec("ray") is None:
        raise UserError("--ray needs Ray: pip install 'rankzero[ray]'")
    own = ["--address", address, "--processes", str(processes)]
    return [sys.executable, "-m", "rankzero.tuning.places.ray_actor", *own, "--", *options]


class Node:
    """Holds the node process on its machine. Ray runs its methods there, two at a time."""

    def __init__(self, folder: str, environ: Mapping[str, str], processes: int) -> None:
        """Start the node with the search's folder and variables, as `srun` does."""
        # Ray sets it for one process with all the actor's processors.
        threads = int(os.environ.get(_THREADS, "1")) // processes
        words = {_THREADS: str(max(1, threads))}
        words.update((name, environ[name]) for name in words if name in environ)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - It lives as long as the node.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rankzero.tuning.places.node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            cwd=folder if Path(folder).is_dir() else None,
            env={**environ, **os.environ, **words},
        )

    def write(self, content: bytes) -> None:
        """Pass a part of the search's messages on; nothing: its end."""
        assert self._process.stdin is not None
        left = memoryview(content)
        while left:
            left = left[os.write(self._process.stdin.fileno(), left) :]
        if not content:
            self._process.stdin.close()

    def read(self) -> bytes:
        """Return a part of the node's messages, once there is one; nothing: their end."""
        assert self._process.stdout is not None
        return os.read(self._process.stdout.fileno(), _CHUNK_BYTES)

    def end(self) -> tuple[int, str]:
        """Return the node's exit status, and its last words, once it has ended."""
        status = self._process.wait()
        self._errors.seek(0)
        return status, self._errors.read()[-_MOST_ERROR_BYTES:].decode(errors="replace").strip()


def main() -> int:
    """Connect the search with a node in an actor, until one of them ends."""
    parser = argparse.ArgumentParser(prog="ray_actor")
    parser.add_argument("--address", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    output = os.dup(1)
    # Words of Ray are no message.
    os.dup2(2, 1)
    import ray

    try:
        _refuse_unreachable(arguments.address)
        ray.init(arguments.address, log_to_driver=False, logging_level="error")
        actor = _actor(ray, arguments.options, arguments.processes)
        threading.Thread(target=_pass_on, args=(ray.get, actor), daemon=True).start()
        while content := ray.get(actor.read.remote()):
            # The node ends with its input, and cleans up. Ray would kill it.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            left = memoryview(content)
            while left:
                left = left[os.write(output, left) :]
        status, words = ray.get(actor.end.remote())
    except Exception as error:
        # The search quotes it.
        status, words = 1, f"{arguments.address}: {type(error).__name__}: {error}"
    print(words, file=sys.stderr, flush=True)
    return int(status)


def _refuse_unreachable(address: str) -> None:
    """Raise OSError if nothing answers at a ``HOST:PORT``. Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            pass


def _actor(ray: Any, options: Sequence[str], processes: int) -> Any:
    """Ask Ray for an actor. It waits for its resources."""
    chosen: dict[str, Any] = {"num_cpus": processes, "max_restarts": 0, "max_concurrency": 2}
    if ray.cluster_resources().get("GPU"):
        chosen["num_gpus"] = processes
    chosen.update((name, _value(text)) for name, text in config.parse_assignments(options).items())
    own = {name: text for name, text in os.environ.items() if name not in _OF_ONE_MACHINE}
    return ray.remote(Node).options(**chosen).remote(str(Path.cwd()), own, processes)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _pass_on(get: Callable[[Any], None], actor: Any) -> None:
    """Pass the search's messages on to the actor. One part at a time: the actor has two threads."""
    content = b"a first part"
    while content:
        try:
            content = os.read(0, _CHUNK_BYTES)
        except ConnectionError:  # The search died, and left messages unread.
            content = b""
        try:
            get(actor.write.remote(content))
        except Exception:
            return  # The other direction reports the actor's end.


if __name__ == "__main__":
    # Ray's own threads may wait for the machine that is gone.
    os._exit(main())

"""Ray's own daemons as a cluster on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

RAY = (sys.executable, "-m", "ray.scripts.scripts")


class Cluster:
    """Ray's own daemons on this machine: a head without processors, and machines of two.

    Each machine declares two GPUs. Ray hands them out by CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, folder: str, environ: Mapping[str, str]) -> None:
        self._environ = environ
        # Ray's sockets need a short path.
        alone = ("--head", "--port=0", "--include-dashboard=false")
        self._start(*alone, "--num-cpus=0", f"--temp-dir={folder}")
        self.address = Path(folder, "ray_current_cluster").read_text()
        self.add_machine()

    def add_machine(self) -> None:
        self._start(f"--address={self.address}", "--num-cpus=2", "--num-gpus=2")

    def _start(self, *options: str) -> None:
        environ = {**os.environ, **self._environ, "RAY_USAGE_STATS_ENABLED": "0"}
        words = [*RAY, "start", *options, "--disable-usage-stats"]
        done = subprocess.run(words, check=False, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def running(environ: Mapping[str, str] = os.environ) -> Iterator[Cluster]:
    """Run a cluster with one machine, and end it with all that it has started.

    `environ`: further variables of its daemons.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        try:
            yield Cluster(folder, environ)
        finally:
            # Ray's own command to stop ends the daemons of all clusters.
            _kill_all(folder)


def _kill_all(folder: str) -> None:
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in word for word in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def nodes() -> list[psutil.Process]:
    """Return the processes of hosts, on all machines of Ray."""
    return of_ray("rankzero.tuning.places.node")


def of_ray(words: str) -> list[psutil.Process]:
    """Return the processes with these words that actors started. Slurm's lack Ray's variables."""
    of_all = psutil.process_iter(["cmdline", "environ"])
    return [
        one
        for one in of_all
        if words in " ".join(one.info["cmdline"] or ())
        and "RAY_JOB_ID" in (one.info["environ"] or ())
    ]

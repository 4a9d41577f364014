"""The real command, in a folder of its own."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rankzero.catalog import lookup
from rankzero.catalog.lookup import folders, mlflow_id
from rankzero.events import Event, RunEnded, RunStarted, StepsLogged
from rankzero.mlflow_store.client import MlflowRuns, RunRecord
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from support.paths import FIXTURES
from support.stores import free_port as free_port
from support.warm import Warm, WarmProcess

TINY = FIXTURES / "tiny.py"
SECONDS = 200.0


@functools.cache
def warm_server() -> Warm:
    """Return the server of warm commands, one for each process that runs tests."""
    server = Warm()
    atexit.register(server.close)
    return server


@dataclasses.dataclass
class Command:
    """Runs ``rankzero`` in `folder`."""

    folder: Path
    environ: dict[str, str]
    started: list[subprocess.Popen[str] | WarmProcess]

    def start(self, *words: object, cold: bool = False) -> subprocess.Popen[str] | WarmProcess:
        """Start a command, forked from a process with PyTorch loaded or, if `cold`, anew."""
        if not cold and warm_server().can(self.environ):
            forked = warm_server().start([*map(str, words)], self.folder, self.environ)
            self.started.append(forked)
            return forked
        return self.start_program(sys.executable, "-m", "rankzero", *map(str, words))

    def start_program(self, *words: str) -> subprocess.Popen[str]:
        """Start a program in the folder."""
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def __call__(self, *words: object, cold: bool = False) -> tuple[int, str]:
        """Return the exit code and all that was printed."""
        process = self.start(*words, cold=cold)
        output, _ = process.communicate(timeout=SECONDS)
        return process.wait(), output

    def succeed(self, *words: object, cold: bool = False) -> str:
        """Run a command that must end with exit code 0; return all that was printed."""
        code, output = self(*words, cold=cold)
        assert code == 0, output
        return output

    @property
    def runs(self) -> list[RunFolder]:
        return sorted(
            folders(self.folder / "mlruns" / "runs"), key=lambda folder: folder.path.stat().st_mtime
        )

    def wait_for_step(self, step: int, name: str | None = None) -> RunFolder:
        """Return the newest run once its journal has reached `step`."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for folder in self.runs[::-1]:
                if max(losses(folder), default=0) >= step and name in (None, folder.path.name):
                    return folder
            time.sleep(0.05)
        raise TimeoutError(f"no run reached step {step}")


def events(folder: RunFolder) -> list[Event]:
    return list(read_all(folder.events))


def starts(folder: RunFolder) -> list[int]:
    """Return the step at which each attempt began."""
    return [event.step for event in events(folder) if isinstance(event, RunStarted)]


def last_end(folder: RunFolder) -> RunEnded:
    """Return how the newest attempt ended, as the journal has it."""
    ended = lookup.last_end(folder)
    assert ended is not None
    return ended


def losses(folder: RunFolder) -> dict[int, float]:
    """Return the journal's train/loss by step; later attempts' values replace earlier ones."""
    found: dict[int, float] = {}
    for event in read_all(folder.events):
        if isinstance(event, StepsLogged) and "train/loss" in event.metrics:
            found.update(zip(event.steps, event.metrics["train/loss"], strict=True))
    return found


def tracked(folder: RunFolder) -> RunRecord:
    """Return a run as MLflow has it."""
    run_id = mlflow_id(folder)
    assert run_id is not None
    return MlflowRuns(folder.identity.tracking_uri).find_run(run_id)


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)


def wait_for_status(folder: RunFolder, status: str) -> None:
    """Wait until MLflow has the status: a command that a signal stopped waits ten seconds."""
    wait_until(lambda: mlflow_id(folder) is not None and tracked(folder).status == status)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return what still runs of the commands: everything started in their folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="session")
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without a run: making one takes seconds, a copy does not."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowRuns(f"sqlite:///{path}")
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # all of it into the one file
    return path


@pytest.fixture
def rankzero(tmp_path: Path, new_store: Path) -> Iterator[Command]:
    with command_in(tmp_path, new_store) as command:
        yield command


@contextlib.contextmanager
def command_in(folder: Path, store: Path) -> Iterator[Command]:
    """The command in a folder with an empty store; what it has started ends with the block."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLFLOW_", "RANKZERO_"))
    }
    command = Command(
        folder, {**environ, "OMP_NUM_THREADS": "1", "RANKZERO_DELIVERY_GRACE_SECONDS": "120"}, []
    )
    (folder / "mlruns").mkdir()
    shutil.copy(store, folder / "mlruns" / "mlflow.db")
    try:
        yield command
    finally:
        for process in command.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for late in processes_of(folder):  # couriers that draw what no test will look at
            with contextlib.suppress(psutil.NoSuchProcess):
                if (
                    psutil.Process() not in late.parents()
                ):  # multiprocessing's helpers of a test that worked in the folder
                    late.kill()

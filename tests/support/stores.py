"""Real tracking stores for the tests: sqlite, a private PostgreSQL, MLflow's server over HTTP."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankzero.mlflow_store.server import environment
from rankzero.mlflow_store.uris import prepare_store

if TYPE_CHECKING:
    from rankzero.mlflow_store.client import RunRecord


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """MLflow's server, artifacts proxied; it can be killed and started again.

    `artifacts`: where it keeps them, by default below `root`.
    """

    def __init__(self, root: Path, database: str, workers: int = 1, artifacts: str = "") -> None:
        self.root, self._database, self._port = root, database, free_port()
        self._workers, self._artifacts = workers, artifacts or str(root / "served")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._process is not None:
            return
        command = [
            *(sys.executable, "-P", "-m", "mlflow", "server"),
            *("--backend-store-uri", self._database),
            *("--artifacts-destination", self._artifacts, "--port", str(self._port)),
            *("--workers", str(self._workers)),
        ]
        with (self.root / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment(os.environ),
                stdout=log,
                stderr=log,
                cwd=self.root,
                start_new_session=True,
            )

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.uri}/health", timeout=2),
            ):
                return
            time.sleep(0.1)
        raise AssertionError((self.root / "server.log").read_text())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve during the block. Its end kills the server."""
        self.start()
        self.wait()
        try:
            yield
        finally:
            self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait()
            self._process = None


def list_runs(tracking_uri: str) -> list[RunRecord]:
    """Return all runs of a store, the newest first."""
    from rankzero.mlflow_store.client import MlflowRuns
    from rankzero.mlflow_store.client.records import RunRecord

    client = MlflowRuns(tracking_uri)._client
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    newest_first = ["attributes.start_time DESC"]
    return [RunRecord.of(run) for run in client.search_runs(experiments, order_by=newest_first)]


def mlflow_runs(folder: Path) -> dict[str, RunRecord]:
    """Return the runs of the embedded store of a command's folder, by name."""
    found = list_runs(f"sqlite:///{folder / 'mlruns' / 'mlflow.db'}")
    return {run.name: run for run in found}


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, for copies: making the tables takes seconds."""
    from rankzero.mlflow_store.client import MlflowRuns

    path = tmp_path_factory.mktemp("template") / "mlflow.db"
    prepare_store(f"sqlite:///{path}")
    MlflowRuns(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite(empty_database: Path, tmp_path: Path) -> str:
    """The URI of a new sqlite store."""
    return copied(empty_database, tmp_path)


@pytest.fixture(scope="module")
def sqlite_of_all(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URI of a sqlite store for all of a module's tests, each with its own runs."""
    return copied(empty_database, tmp_path_factory.mktemp("store"))


def copied(database: Path, folder: Path) -> str:
    for path in database.parent.glob("mlflow.db*"):
        shutil.copy(path, folder / path.name)
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture(scope="session")
def server(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests; each uses its own run."""
    root = tmp_path_factory.mktemp("server")
    made = Server(root, copied(empty_database, root))
    with made.running():
        yield made


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URI of a database in a private PostgreSQL."""
    with private_postgres() as uri:
        yield uri


@contextlib.contextmanager
def private_postgres() -> Iterator[str]:
    """Run a PostgreSQL, and yield its URI. It refuses to run as root, so it does not."""
    binaries = _postgres_binaries()
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="rankzero-postgres-"))
    if user is not None:
        shutil.chown(folder, user)
    port, data, log = free_port(), folder / "data", folder / "log"
    options = (
        f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=200"
    )

    def run(name: str, *arguments: object) -> None:
        subprocess.run(
            [binaries / name, "-D", data, *map(str, arguments)],
            check=True,
            cwd=folder,
            user=user,
            extra_groups=[] if user else None,
            stdout=subprocess.DEVNULL,
        )

    run("initdb", "-A", "trust", "-U", "tests", "-N")
    run("pg_ctl", "-l", log, "-o", options, "-w", "start")
    try:
        yield f"postgresql+psycopg2://tests@127.0.0.1:{port}/postgres"
    finally:
        run("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def _postgres_binaries() -> Path:
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    places = [*debian, Path("/usr/local/bin"), Path("/usr/bin")]
    for place in places:
        if (place / "initdb").exists() and (place / "pg_ctl").exists():
            return place
    raise AssertionError(
        f"PostgreSQL is not installed (looked in {places}): apt-get install postgresql; "
        f"its tests run as {getpass.getuser()!r} or, for root, as 'postgres'"
    )

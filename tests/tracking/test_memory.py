"""A long absence of MLflow costs no memory that grows with the journal, in any process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rankzero.run_store import delivery_state
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status
from support.fake_emitter import METRICS, windows
from support.paths import SUPPORT
from support.runs import append, make_folder, started
from support.stores import Server
from torture.proxy import Proxy

PART, REST = 20_000, 180_000  # steps: about 2 MB of journal, and 20
JOURNAL_BYTES = 18 << 20  # at least
ALLOWED = {"emitter": 4 << 20, "recorder": 16 << 20, "courier": 32 << 20}
"""How much each may grow, in bytes, by 20 MiB of journal. Rank 0 holds one event. The recorder
reads a MiB at a time, about five MiB as events, and the courier ten more as points. All of the
journal would be 200."""
QUICK = {"RANKZERO_DELIVERY_GRACE_SECONDS": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"}
PATIENCE = 100.0  # seconds
Away = Callable[
    [pytest.FixtureRequest], contextlib.AbstractContextManager[tuple[str, Callable[[], None]]]
]
"""Makes a server that is away, now or on request; yields its address and that request."""


@dataclasses.dataclass
class Emitting:
    """A training process that writes on demand, its recorder and courier.

    `most` is the most memory of each, in bytes.
    """

    process: subprocess.Popen[str]
    folder: RunFolder
    most: dict[str, int] = dataclasses.field(default_factory=dict)

    def until(self, true: Callable[[], object], what: str) -> None:
        """Wait, and watch the memory."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline, f"{what} did not happen: {self.progress}"
            self.look()
            time.sleep(0.02)

    def look(self) -> None:
        for name, size in self.memory().items():
            self.most[name] = max(size, self.most.get(name, 0))

    def memory(self) -> dict[str, int]:
        found = {"emitter": psutil.Process(self.process.pid)}
        for child in found["emitter"].children(recursive=True):
            with contextlib.suppress(
                psutil.Error, IndexError
            ):  # one that ends, or is about to become what it will be
                name = child.cmdline()[3].rpartition(".")[2]  # python -P -m rankzero.tracking.…
                found |= {name: child} if name in ALLOWED else {}
        if "courier" in found:
            with contextlib.suppress(
                OSError
            ):  # else it would wait for whatever else this machine does
                os.sched_setscheduler(found["courier"].pid, os.SCHED_OTHER, os.sched_param(0))
        return {name: one.memory_info().rss for name, one in found.items()}

    def write(self) -> None:
        """Have it write the next part, and wait until the journal has it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.until(self.process.stdout.readline, "the journal")

    def fail_again(self) -> None:
        """Wait for a try that fails, after now: each is written down."""
        before = self.progress.updated
        self.until(
            lambda: self.progress.retries.error is not None and self.progress.updated > before,
            "a try",
        )

    @property
    def progress(self) -> delivery_state.DeliveryState:
        return delivery_state.load(delivery_state.path_of(self.folder, 0))


@contextlib.contextmanager
def emitting(root: Path, uri: str) -> Iterator[Emitting]:
    """Start a training process that has written its first part. Kill all processes in the end."""
    name = f"run-{uuid.uuid4().hex[:6]}"
    process = subprocess.Popen(
        [sys.executable, SUPPORT / "fake_emitter.py", root, name, uri, str(PART), str(REST)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **QUICK},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        yield Emitting(process, RunFolder(root / name))
    finally:
        for child in psutil.Process(process.pid).children(recursive=True)[::-1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        process.kill()
        process.communicate()


@contextlib.contextmanager
def refused(_: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[[], None]]]:
    """A port on which nobody listens, now or later."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}", lambda: None


@contextlib.contextmanager
def silent(_: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[[], None]]]:
    """A port that takes every connection, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", lambda: None


@contextlib.contextmanager
def goes_away(request: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server that has made the run when it goes; what is called sends it away."""
    server: Server = request.getfixturevalue("server")
    server.start()
    server.wait()
    with Proxy(server.uri) as proxy:
        yield proxy.uri, lambda: setattr(proxy, "mode", "refuse")


@pytest.mark.parametrize("away", [refused, silent, goes_away])
@pytest.mark.slow
def test_memory_stays_while_the_server_is_away_and_the_journal_grows(
    tmp_path: Path, request: pytest.FixtureRequest, away: Away
) -> None:
    """From two tries at a tenth of the journal to one try at all of it."""
    with away(request) as (uri, go), emitting(tmp_path / "runs", uri) as run:
        if away is goes_away:
            run.until(lambda: delivery_status.status(run.folder).run_id, "the run in MLflow")
            go()
        run.fail_again()
        run.fail_again()
        before, run.most = run.memory(), {}
        run.write()
        run.fail_again()
        assert set(before) == set(run.most) == {"emitter", "recorder", "courier"}
        grown = {name: run.most[name] - before[name] for name in before}
        assert (
            run.folder.events.stat().st_size > JOURNAL_BYTES
            and delivery_status.status(run.folder).pending > JOURNAL_BYTES // 2
        )
        assert all(size < ALLOWED[name] for name, size in grown.items()), grown


def test_memory_stays_while_all_that_has_waited_is_delivered(tmp_path: Path) -> None:
    """After an absence: the same courier's work, on the whole journal at once."""
    folder = make_folder(tmp_path)
    append(folder, started(), *windows(1, PART + REST))
    assert folder.events.stat().st_size > JOURNAL_BYTES
    done = subprocess.run(
        [sys.executable, SUPPORT / "fake_delivery.py", folder.path],
        check=True,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        },
    )
    begin, most, count = map(int, done.stdout.split())
    assert count == (PART + REST) * len(METRICS)
    assert most - begin < ALLOWED["courier"], f"{(most - begin) / 1e6:.1f} MB"

"""The private names of PyTorch's agent and of multiprocessing still do what they did."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import socket
import threading
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from rankzero.launch import agent, fork_server, torch_compat
from rankzero.launch.machines import Machines
from rankzero.launch.torch_compat import ObservedAgent, wait_by_polling
from support.commands import free_port
from support.returning import fail_once, returned


class Observer:
    """Notes what an agent reports."""

    def __init__(self, *, stops: bool = False) -> None:
        self._stops = stops
        self.is_stopped = False
        self.reports: list[str] = []
        self.pids: list[int] = []
        self.looks = 0

    def starting(self) -> None:
        self.reports.append("starting")

    def started(self, pids: list[int]) -> None:
        self.reports.append("started")
        self.pids += pids
        self.is_stopped = self._stops

    def stopping(self) -> None:
        self.reports.append("stopping")

    def kill_late(self) -> None:
        self.looks += 1


def run_agent(folder: Path, observer: Observer) -> bool:
    """Launch two workers of which one fails at the first start; return whether they succeed."""
    topology = agent.Topology(2, max_restarts=1)
    (folder / "logs").mkdir()
    logs = DefaultLogsSpecs(log_dir=str(folder / "logs"))
    torch_compat.configure_environment()
    fork_server.ensure_running()
    spec = agent._worker_spec(
        topology, fail_once, str(folder), agent._handler(topology, None, print), None
    )
    try:
        # It must see by itself that a worker has failed, and that others have returned.
        return not ObservedAgent(spec, logs, observer, monitor_seconds=600).run().is_failed()
    finally:
        spec.rdzv_handler.shutdown()


def test_agent_reports_each_start_and_stop_of_its_workers(tmp_path: Path) -> None:
    observer = Observer()
    assert run_agent(tmp_path, observer)
    assert observer.reports[:5] == ["starting", "started", "stopping", "starting", "started"]
    assert observer.looks >= 2
    pids = {int(path.name) for path in (tmp_path / "pids").iterdir()}
    assert set(observer.pids) == pids and len(pids) == 4


def test_stopped_agent_restarts_nothing(tmp_path: Path) -> None:
    observer = Observer(stops=True)
    assert not run_agent(tmp_path, observer)
    assert observer.reports.count("started") == 1


def test_agent_sets_and_reads_the_restarts_that_are_overridden(tmp_path: Path) -> None:
    topology = agent.Topology(1, max_restarts=3)
    spec = agent._worker_spec(topology, fail_once, "", agent._handler(topology, None, print), None)
    logs = DefaultLogsSpecs(log_dir=str(tmp_path))
    assert LocalElasticAgent(spec, logs)._remaining_restarts == 3
    assert ObservedAgent(spec, logs, Observer())._remaining_restarts == 3


def test_agent_leaves_signal_handlers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    assert run_agent(tmp_path, Observer())
    assert [signal.getsignal(number) for number in numbers] == before


def test_killed_worker_that_had_returned_does_not_block_the_agent() -> None:
    context = multiprocessing.get_context("spawn")
    event, ready = context.Event(), [context.Event(), context.Event()]
    workers = [context.Process(target=returned, args=(event, one), daemon=True) for one in ready]
    for worker, one in zip(workers, ready, strict=True):
        worker.start()
        assert one.wait(60)
    workers[0].kill()
    workers[0].join()
    setter = threading.Thread(target=event.set, daemon=True)
    setter.start()
    setter.join(10)
    assert not setter.is_alive(), "it waits for the killed process to wake up"
    workers[1].join(10)
    assert workers[1].exitcode == 0


def test_polling_ends_in_time() -> None:
    event = multiprocessing.get_context("spawn").Event()
    assert not wait_by_polling(event, 0.03)
    event.set()
    assert wait_by_polling(event) and wait_by_polling(event, 0.0)


def test_environment_of_the_agent() -> None:
    torch_compat.configure_environment(environ := dict(os.environ))
    assert environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == ""
    assert environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize(
    ("seconds", "milliseconds"), [(60.0, 60_000), (math.inf, 2**31 - 1), (6e6, 2**31 - 1)]
)
def test_silent_connections_to_the_rendezvous_end(seconds: float, milliseconds: int) -> None:
    """The kernel takes no more than a number of 31 bits. Settings do, such as "never"."""
    port = free_port()
    machines = Machines(1, 2, f"localhost:{port}", "job", "127.0.0.1")
    handler = agent._handler(
        agent.Topology(1, machines=machines, silence_seconds=seconds), None, print
    )
    found = []
    for one in psutil.Process().net_connections("tcp"):
        if one.raddr and one.raddr.port == port:
            with socket.socket(fileno=os.dup(one.fd)) as connection:
                found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    handler.shutdown()
    assert found and set(found) == {milliseconds}


def test_pages_about_a_failed_rank_are_not_logged() -> None:
    torch_compat.silence_loggers()
    for name in ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        found = logging.getLogger(f"torch.distributed.elastic.{name}")
        assert not found.isEnabledFor(logging.ERROR)

"""How workers leave, and that the agent outlives those that are killed at that moment."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import threading
from pathlib import Path

import psutil
import pytest

from rankzero.launch import agent, rendezvous
from rankzero.launch.agent import wait_by_looking
from rankzero.launch.signals import SignalForwarder
from rankzero.ranks import Ranks
from support.returning import fail_without_words, meet, returned


def test_a_worker_that_is_killed_after_it_has_returned_holds_up_nobody() -> None:
    context = multiprocessing.get_context("spawn")
    event, told = context.Event(), [context.Event(), context.Event()]
    workers = [context.Process(target=returned, args=(event, one), daemon=True) for one in told]
    for worker, one in zip(workers, told, strict=True):
        worker.start()
        assert one.wait(60)
    workers[0].kill()
    workers[0].join()
    lets_go = threading.Thread(target=event.set, daemon=True)
    lets_go.start()
    lets_go.join(10)
    assert not lets_go.is_alive(), "it waits for the dead to wake"
    workers[1].join(10)
    assert workers[1].exitcode == 0


def test_looking_ends_in_time() -> None:
    event = multiprocessing.get_context("spawn").Event()
    assert not wait_by_looking(event, 0.03)
    event.set()
    assert wait_by_looking(event) and wait_by_looking(event, 0.0)


def test_a_rank_that_fails_on_a_full_disk_is_a_failure_like_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        SignalForwarder() as signals,
        pytest.raises(agent.WorkersFailed, match="no room on the disk"),
    ):
        agent.run(agent.Topology(2), fail_without_words, str(tmp_path), tmp_path / "logs", signals)
    other = int((tmp_path / "1").read_text())
    assert not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE
    assert "Traceback" not in capfd.readouterr().err


def test_on_one_machine_no_other_can_reach_what_the_processes_meet_by(tmp_path: Path) -> None:
    """Rendezvous states are unpickled: whoever can write one can run code."""
    with SignalForwarder() as signals:
        assert (
            agent.run(agent.Topology(2), meet, str(tmp_path), tmp_path / "logs", signals) == "met"
        )
    addresses = json.loads((tmp_path / "listening.json").read_text())
    assert addresses, "rank 0 serves a store"
    assert set(addresses) <= {"127.0.0.1", "::1"}


def test_gloo_talks_on_the_loopback_unless_somebody_has_chosen() -> None:
    environ: dict[str, str] = {}
    rendezvous.keep_gloo_on_loopback(environ)
    assert environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    rendezvous.keep_gloo_on_loopback(chosen := {"GLOO_SOCKET_IFNAME": "eth0"})
    assert chosen == {"GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({"MASTER_ADDR": "node-1", "MASTER_PORT": "1"}, Ranks(0, 2, 0, 2)),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, Ranks(0, 4, 0, 2)),
        (
            {
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "1",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
            Ranks(0, 2, 0, 2),
        ),
        ({"MASTER_ADDR": "localhost"}, Ranks(0, 2, 0, 2)),
        ({}, Ranks(0, 2, 0, 2)),
    ],
)
def test_other_launchers_and_several_machines_keep_their_store(
    environ: dict[str, str], ranks: Ranks
) -> None:
    assert rendezvous.on_loopback(ranks, datetime.timedelta(seconds=1), environ) is None

"""Launches with the real agent: reports of failed workers, and access to the rendezvous."""

from __future__ import annotations

import datetime
import json
import signal
from pathlib import Path

import psutil
import pytest

from rankzero.launch import agent, rendezvous
from rankzero.launch.signals import SignalForwarder
from rankzero.ranks import Ranks
from support.returning import fail_without_words, killed, meet


def test_rank_that_fails_on_a_full_disk_fails_the_launch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with SignalForwarder() as signals:
        result = agent.run(
            agent.Topology(2), fail_without_words, str(tmp_path), tmp_path / "logs", signals
        )
    assert result.status == "FAILED" and "too full to write why" in result.reason
    other = int((tmp_path / "1").read_text())
    assert not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE
    assert "Traceback" not in capfd.readouterr().err


def test_killed_rank_is_reported_with_its_signal(tmp_path: Path) -> None:
    with SignalForwarder() as signals:
        result = agent.run(agent.Topology(2), killed, None, tmp_path / "logs", signals)
    assert (result.status, result.killed_by) == ("FAILED", signal.SIGKILL)
    assert result.exit_code == -signal.SIGKILL
    assert result.reason == "rank 1 was killed by SIGKILL"


def test_rendezvous_of_one_machine_listens_on_the_loopback_only(tmp_path: Path) -> None:
    """Rendezvous states are unpickled: whoever can write one can run code."""
    with SignalForwarder() as signals:
        result = agent.run(agent.Topology(2), meet, str(tmp_path), tmp_path / "logs", signals)
    assert result == agent.LaunchResult("met")
    addresses = json.loads((tmp_path / "listening.json").read_text())
    assert addresses, "rank 0 serves a store"
    assert set(addresses) <= {"127.0.0.1", "::1"}


def test_gloo_uses_the_loopback_unless_an_interface_is_set() -> None:
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
def test_other_launchers_and_several_machines_use_their_own_store(
    environ: dict[str, str], ranks: Ranks
) -> None:
    assert rendezvous.on_loopback(ranks, datetime.timedelta(seconds=1), environ) is None

"""Launches with the real agent: reports of failed workers, and access to the rendezvous."""

from __future__ import annotations

import datetime
import json
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rankzero.launch import agent, rendezvous
from rankzero.launch.signals import SignalForwarder
from rankzero.ranks import Ranks
from support import second_user
from support.returning import (
    fail_without_words,
    killed,
    meet,
    print_on_a_full_disk,
)


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


def test_print_on_a_full_disk_ends_no_rank(tmp_path: Path) -> None:
    with SignalForwarder() as signals:
        result = agent.run(
            agent.Topology(1), print_on_a_full_disk, None, tmp_path / "logs", signals
        )
    assert result == agent.LaunchResult("printed")
    logs = agent.log_files(tmp_path / "logs", 0)
    assert [path.read_text() for path in logs] == ["before ü\nafter"] * 2


def test_unbuffered_rank_that_dies_leaves_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server of ranks, which has the variable, must be one of this test's own.
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    code = (
        "from pathlib import Path\n"
        "from rankzero.launch import agent\n"
        "from rankzero.launch.signals import SignalForwarder\n"
        "from support.returning import die_after_a_print\n"
        "if __name__ == '__main__':\n"
        "    with SignalForwarder() as signals:\n"
        "        agent.run(agent.Topology(1), die_after_a_print, None, Path('logs'), signals)\n"
    )
    (tmp_path / "launch.py").write_text(code)
    subprocess.run([sys.executable, "launch.py"], cwd=tmp_path, check=True)
    logs = agent.log_files(tmp_path / "logs", 0)
    assert ["last words\n" in path.read_text() for path in logs] == [True, True]


def test_killed_rank_is_reported_with_its_signal(tmp_path: Path) -> None:
    with SignalForwarder() as signals:
        result = agent.run(agent.Topology(2), killed, None, tmp_path / "logs", signals)
    assert (result.status, result.killed_by) == ("FAILED", signal.SIGKILL)
    assert result.reason == "rank 1 was killed by SIGKILL"


def test_ranks_of_one_machine_serve_no_store(tmp_path: Path) -> None:
    """A TCP store answers any local user, and its rendezvous states are unpickled."""
    # Other tests may have left a server in this process.
    before = [port for _, port in second_user.listening(psutil.Process())]
    with SignalForwarder() as signals:
        result = agent.run(agent.Topology(2), meet, str(tmp_path), tmp_path / "logs", signals)
    assert result == agent.LaunchResult("met")
    found = json.loads((tmp_path / "listening.json").read_text())
    addresses = [address for address in found if address[1] not in before]
    assert len(addresses) >= 2, "the ranks' gloo"
    assert {address for address, _, _ in addresses} <= {"127.0.0.1", "::1"}
    assert [keys for _, _, keys in addresses] == [None] * len(addresses)


def test_gloo_uses_the_loopback_unless_an_interface_is_set() -> None:
    environ: dict[str, str] = {}
    rendezvous.keep_gloo_on_loopback(environ)
    assert environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    rendezvous.keep_gloo_on_loopback(chosen := {"GLOO_SOCKET_IFNAME": "eth0"})
    assert chosen == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_each_start_of_a_job_has_a_store_of_its_own() -> None:
    second = datetime.timedelta(seconds=1)
    with rendezvous.private_folder() as folder:
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        stores = []
        for start in ("0", "1"):
            environ = {"TORCHELASTIC_RESTART_COUNT": start}
            rendezvous.use_folder(folder, environ)
            stores.append(rendezvous.private_store(Ranks(), second, environ))
        stores[0].set("address", "of a dead rank")
        assert not stores[1].check(["address"])
        del stores
    assert not Path(folder).exists()


def test_several_machines_use_the_store_of_pytorch() -> None:
    environ = {"RANKZERO_STORE": "of the launcher above this one"}
    rendezvous.use_folder(None, environ)
    assert not rendezvous.is_one_machine(environ)

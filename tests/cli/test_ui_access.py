"""Who gets at `rankzero ui`: real requests, from this machine and from another one (a network namespace)."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.conftest import Command, free_port
from rankzero.cli import ui
from rankzero.errors import UserError
from rankzero.tracking import server

HERE, THERE = "10.213.7.1", "10.213.7.2"
SEARCH = "/api/2.0/mlflow/experiments/search?max_results=5"
CREATE = "/api/2.0/mlflow/experiments/create"
ASK = """
import base64, json, sys, urllib.error, urllib.request
for url, user, headers, body in json.loads(sys.argv[1]):
    if user:
        headers["Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            print(answer.status)
    except urllib.error.HTTPError as error:
        print(error.code)
    except OSError as error:
        print("unreachable")
"""
Question = tuple[str, str, dict[str, str], dict[str, str] | None]


def asked(*questions: Question, inside: int | None = None) -> list[str]:
    """Ask, from the network namespace of the process `inside` if there is one; return the answers' statuses."""
    enter = [] if inside is None else ["nsenter", "-t", str(inside), "-n"]
    done = subprocess.run(
        [*enter, sys.executable, "-c", ASK, json.dumps(questions)], check=True, capture_output=True, text=True
    )
    return done.stdout.split()


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """Another machine: a process in a network of its own, with a cable to here. Skips where the kernel forbids it."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no network namespace of one's own here: no {', '.join(missing)}")
    process = subprocess.Popen(["unshare", "-n", "sleep", "600"], stderr=subprocess.PIPE)
    link = f"rz{process.pid % 100_000}"
    try:
        wire = [
            f"ip link add {link}a type veth peer name {link}b", f"ip link set {link}b netns {process.pid}",
            f"ip addr add {HERE}/30 dev {link}a", f"ip link set {link}a up",
            f"nsenter -t {process.pid} -n ip addr add {THERE}/30 dev {link}b",
            f"nsenter -t {process.pid} -n ip link set {link}b up",
        ]  # fmt: skip
        _until_apart(process)
        for line in wire:
            done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespace of one's own here: {line}: {done.stderr.strip()}")
        yield process.pid
    finally:
        process.kill()
        process.communicate()
        subprocess.run(["ip", "link", "del", f"{link}a"], capture_output=True, check=False)


def _until_apart(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has a network of its own."""
    own = Path("/proc/self/ns/net").readlink()
    for _ in range(1000):
        if process.poll() is not None:
            assert process.stderr is not None
            pytest.skip(f"no network namespace of one's own here: {process.stderr.read().decode().strip()}")
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/ns/net").readlink() != own:
                return


class Serving:
    """`rankzero ui` with some options, as it starts."""

    def __init__(self, rankzero: Command, *options: object) -> None:
        self.port, self._options = free_port(), options
        self.process = rankzero.start("ui", "--port", self.port, *options)

    def printed(self) -> str:
        """Return what it says once it serves."""
        assert self.process.stdout is not None
        printed = ""
        while "Ctrl-C ends it" not in printed:
            line = self.process.stdout.readline()
            assert line, printed
            printed += line
        return printed + (self.process.stdout.readline() if self._options else "")

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(timeout=30) == 0


def test_who_gets_in_from_here_and_from_another_machine(rankzero: Command, elsewhere: int) -> None:
    """Both at once: a server takes seconds to start."""
    lone, shared = Serving(rankzero), Serving(rankzero, "--host", "0.0.0.0")
    _check_loopback(lone.printed().split()[2], lone.port, elsewhere)
    password = _check_beyond(shared.printed(), shared.port, elsewhere)
    for one in (lone, shared):
        one.end()
    mlruns = rankzero.folder / "mlruns"
    assert all(stat.S_IMODE((mlruns / name).stat().st_mode) == 0o600 for name in ("auth.db", "auth.ini"))
    assert password.encode() not in b"".join(path.read_bytes() for path in mlruns.rglob("*") if path.is_file())


def _check_loopback(address: str, port: int, elsewhere: int) -> None:
    """No password on this machine; no way in from another one, nor for other sites' pages and names."""
    page = {"Origin": "http://evil.example", "Content-Type": "application/json"}
    answers = asked(
        (address + SEARCH, "", {}, None), (address + SEARCH, "", {"Host": "localhost:8080"}, None),  # a tunnel's end
        (address + SEARCH, "", {"Host": "evil.example"}, None), (address + CREATE, "", page, {"name": "x"}),
        (address + SEARCH, "", {"Host": "10.evil.example"}, None),
    )  # fmt: skip
    assert answers == ["200", "200", "403", "403", "403"]
    assert asked((f"http://{HERE}:{port}{SEARCH}", "", {}, None), inside=elsewhere) == ["unreachable"]


def _check_beyond(printed: str, port: int, elsewhere: int) -> str:
    """Beyond this machine nothing without the password, which is returned; with it, still no other sites' pages."""
    found = re.search(r"user admin, password (\S+)", printed)
    assert found is not None, printed
    me, address = f"admin:{found[1]}", f"http://{HERE}:{port}"
    own = {"Origin": address, "Content-Type": "application/json"}
    evil = {"Origin": "http://evil.example", "Content-Type": "application/json"}
    answers = asked(
        (address + "/health", "", {}, None),
        (address, "", {}, None), (address + SEARCH, "", {}, None), (address + SEARCH, "admin:guess", {}, None),
        (address + CREATE, "", own, {"name": "stranger"}), (address + "/v1/traces", "", own, {"x": "y"}),
        (address + "/graphql", "", own, {"query": "{}"}), (address + "/get-artifact?path=x", "", {}, None),
        (address + "/api/2.0/mlflow-artifacts/artifacts/1", "", {}, None),
        (address + SEARCH, me, {}, None), (address + CREATE, me, own, {"name": "mine"}),
        (address + SEARCH, me, {"Host": "evil.example"}, None), (address + CREATE, me, evil, {"name": "theirs"}),
        inside=elsewhere,
    )  # fmt: skip
    assert answers[0] == "200" and answers[1:9] == ["401"] * 8 and answers[9:] == ["200", "200", "403", "403"]
    return found[1]


def test_insecure_is_said_aloud() -> None:
    assert "insecure: whoever reaches 0.0.0.0:5000" in ui._warning(server.Access(5000, "0.0.0.0"))
    assert not ui._warning(server.Access(5000))


def test_beyond_loopback_the_command_asks_for_users_and_names_who_may_ask() -> None:
    who = server.access("192.0.2.7", 5000, insecure=False, names=(), origins=("https://notes.example",))
    command = server.command(Path("mlruns"), who)
    assert who.authenticated and command[-2:] == ["--app-name", "basic-auth"]
    assert who.names == ("localhost", "localhost:*", "127.0.0.1", "127.0.0.1:*", "192.0.2.7", "192.0.2.7:*")
    assert who.origins == ("http://192.0.2.7:5000", "https://notes.example")
    assert not server.access("192.0.2.7", 5000, insecure=True, names=(), origins=()).authenticated
    named = server.access("0.0.0.0", 5000, insecure=False, names=("box.example:5000",), origins=())
    assert named.names[-1] == "box.example:5000" and "http://box.example:5000" in named.origins


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_this_machine(host: str) -> None:
    assert server.is_loopback(host) and not server.access(host, 1, insecure=False, names=(), origins=()).authenticated


def test_patterns_and_addresses_that_are_none_are_refused() -> None:
    with pytest.raises(UserError, match="no patterns"):
        server.access("0.0.0.0", 1, insecure=False, names=("*",), origins=())
    for host in ("no such host", "x" * 300, "-"):
        with pytest.raises(UserError, match="no address"):
            server.access(host, 1, insecure=False, names=(), origins=())


def test_the_first_start_makes_the_user_and_later_ones_keep_it(tmp_path: Path) -> None:
    environ, says = server.with_users(tmp_path, {})
    assert environ[server.PASSWORD] in says and len(environ[server.PASSWORD]) >= 12
    own, says = server.with_users(tmp_path, {server.PASSWORD: "correct horse battery"})
    assert "correct" not in says and own[server.PASSWORD] == "correct horse battery"
    (tmp_path / "auth.db").write_bytes(b"users")
    environ, says = server.with_users(tmp_path, {})
    assert server.PASSWORD not in environ and "Remove the file" in says
    assert (tmp_path / "auth.db").read_bytes() == b"users"
    with pytest.raises(UserError, match="at least 12"):
        server.with_users(tmp_path / "new", {server.PASSWORD: "short"})

"""Access to `rankzero ui`: real requests, from this machine and another (a network namespace)."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import http.server
import json
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rankzero.catalog.lookup import mlflow_id
from rankzero.cli.commands import ui
from rankzero.cli.main import main
from rankzero.errors import UserError
from rankzero.mlflow_store import server, uris
from rankzero.run_store import delivery_state
from rankzero.tracking import sync
from support.commands import Command, command_in, free_port
from support.paths import SUPPORT
from support.runs import append, ended, make_folder, started
from support.stores import copied

BLOCK = os.getpid() % (
    1 << 14
)  # of four addresses: others' tests may have a cable at the same time
HERE, THERE = (f"10.213.{BLOCK >> 6}.{(BLOCK & 63) * 4 + end}" for end in (1, 2))
SEARCH = "/api/2.0/mlflow/experiments/search?max_results=5"
CREATE = "/api/2.0/mlflow/experiments/create"
ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts"
JSON = {"Content-Type": "application/json"}
EVIL = {"Origin": "http://evil.example", **JSON}
PUBLIC = {"/health", "/api/3.0/mlflow/server-info", "/ajax-api/3.0/mlflow/server-info"}
"""These answer without a password; and `STATIC`, the files of which MLflow's page is made."""
STATIC = "/static-files/"
BESIDE = (
    "/favicon.ico",
    "/static",
    "/static/x",
    "/healthz",
    STATIC,
    f"{STATIC}../handlers.py",
    f"{STATIC}..{SEARCH}",
    f"{STATIC}%2e%2e/handlers.py",
    f"{STATIC}%2e%2e{SEARCH}",
    f"/health/..{SEARCH}",
    "/api/9.9/mlflow/server-info",
)
"""Paths that MLflow serves without a password because they resemble public ones."""
GUARDED = (
    "/version",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/signup",
    f"/{SEARCH}",
    f"/x/..{SEARCH}",
    f"{ARTIFACTS}/mlflow/server-info",
    f"{ARTIFACTS}/health",
    f"{ARTIFACTS}/..{STATIC}index.html",
)
"""These nearly look like it, and must not be taken for it."""
TELLS = {
    "store_type",
    "workspaces_enabled",
    "trace_archival_enabled",
    "multipart_uploads_enabled",
    "multipart_downloads_enabled",
    "presigned_upload_run_id_supported",
    "presigned_upload_model_id_supported",
    "features_enabled",
}
"""The public part of server-info: what the server can do, nothing of what it holds."""
IN_CI = "RANKZERO_CI"
"""Set by .ci/run, which installs what the tests call."""
FORBIDDEN = ("Operation not permitted", "Permission denied", "not supported", "Unknown device type")
"""Messages of tools if the kernel allows no network namespaces or veth pairs."""
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
    """Send requests, from the network namespace of `inside` if given; return the status codes."""
    enter = [] if inside is None else ["nsenter", "-t", str(inside), "-n"]
    done = subprocess.run(
        [*enter, sys.executable, "-c", ASK, json.dumps(questions)],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


class NoNamespace(Exception):
    """This machine gives nobody a network of their own; says why."""


@contextlib.contextmanager
def another_machine() -> Iterator[int]:
    """Yield a process in a network namespace with a link to this one. Raises NoNamespace."""
    process = subprocess.Popen(["unshare", "-n", "sleep", "600"], stderr=subprocess.PIPE)
    link = f"rz{process.pid % 100_000}"
    try:
        _until_apart(process)
        for line in (
            f"ip link add {link}a type veth peer name {link}b",
            f"ip link set {link}b netns {process.pid}",
            f"ip addr add {HERE}/30 dev {link}a",
            f"ip link set {link}a up",
            f"nsenter -t {process.pid} -n ip addr add {THERE}/30 dev {link}b",
            f"nsenter -t {process.pid} -n ip link set {link}b up",
        ):
            done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoNamespace(f"{line}: {done.stderr.strip()}")
        yield process.pid
    finally:
        process.kill()
        process.communicate()
        subprocess.run(["ip", "link", "del", f"{link}a"], capture_output=True, check=False)


def _until_apart(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has a network of its own."""
    own = Path("/proc/self/ns/net").readlink()
    while process.poll() is None:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/ns/net").readlink() != own:
                return
    assert process.stderr is not None
    raise NoNamespace(process.stderr.read().decode().strip())


@pytest.fixture(scope="module")
def cable() -> Iterator[int | str]:
    """A process on another machine, or why there is none.

    Made before the servers start, because they look up their addresses then.
    """
    missing = _missing_tools()
    if missing:
        yield f"no {', '.join(missing)}: Debian's iproute2 and util-linux have them"
        return
    with contextlib.ExitStack() as stack:
        try:
            found: int | str = stack.enter_context(another_machine())
        except NoNamespace as error:
            found = str(error)
        yield found


@pytest.fixture
def elsewhere(cable: int | str) -> int:
    """A process on another machine. Skips without one; in CI only if the kernel forbids it."""
    if isinstance(cable, str):
        assert IN_CI not in os.environ or any(word in cable for word in FORBIDDEN), cable
        pytest.skip(f"no network namespace of one's own here: {cable}")
    return cable


def _missing_tools() -> list[str]:
    return [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]


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


class Served(NamedTuple):
    """The ports of three servers on one store: plain, --host, --host --insecure; output of two."""

    folder: Path
    lone: int
    shared: int
    insecure: int
    address: str
    me: str
    warning: str


@pytest.fixture(scope="module")
def served(
    cable: int | str, tmp_path_factory: pytest.TempPathFactory, new_store: Path
) -> Iterator[Served]:
    """All at once: a server takes seconds to start."""
    assert cable
    with command_in(tmp_path_factory.mktemp("served"), new_store) as command:
        lone = Serving(command)
        shared, insecure = (
            Serving(command, "--host", "0.0.0.0", *more) for more in ((), ("--insecure",))
        )
        address, said, warning = lone.printed().split()[2], shared.printed(), insecure.printed()
        password = re.search(r"user admin, password (\S+)", said)
        assert password is not None, said
        yield Served(
            command.folder,
            lone.port,
            shared.port,
            insecure.port,
            address,
            f"admin:{password[1]}",
            warning,
        )
        for one in (lone, shared, insecure):
            one.end()


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Every method and path that MLflow's server knows."""
    program = SUPPORT / "mlflow_routes.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path_factory.mktemp("routes")],
        check=True,
        capture_output=True,
        text=True,
    )
    return [(method, path) for method, path in json.loads(done.stdout)]


@pytest.mark.cluster
def test_default_serves_only_this_machine_and_no_other_site(served: Served) -> None:
    """No password. A tunnel ends on this machine; 127.0.0.2 is another address of it."""
    address = served.address
    assert address == f"http://127.0.0.1:{served.lone}"
    answers = asked(
        (address + SEARCH, "", {}, None),
        (address + SEARCH, "", {"Host": "localhost:8080"}, None),
        *(
            (address + SEARCH, "", {"Host": name}, None)
            for name in ("evil.example", "10.evil.example", HERE)
        ),
        (address + CREATE, "", EVIL, {"name": "x"}),
        (f"http://127.0.0.2:{served.lone}{SEARCH}", "", {"Host": "127.0.0.1"}, None),
    )
    assert answers == ["200", "200", "403", "403", "403", "403", "unreachable"]


@pytest.mark.cluster
def test_other_hosts_need_a_password_and_so_does_this_one(served: Served) -> None:
    """A user with it is still no other site's page, and comes by this machine's name."""
    _check_password(served, f"http://127.0.0.1:{served.shared}")
    assert asked(
        (f"http://127.0.0.2:{served.shared}{SEARCH}", served.me, {"Host": "localhost"}, None)
    ) == ["200"]


@pytest.mark.cluster
def test_every_route_but_the_public_ones_needs_the_password(
    served: Served, routes: list[tuple[str, str]]
) -> None:
    """Each route of both halves of MLflow with its method, and paths that resemble public ones."""
    assert len(routes) > 400 and {
        ("PUT", f"{ARTIFACTS}/1"),
        ("GET", "/get-artifact"),
        ("GET", "/version"),
    } < {*routes}
    answers = statuses(served.shared, routes)
    public = {path for (_, path), status in answers.items() if status != 401}
    assert public - {"/static-files/1", "/static/1"} == PUBLIC
    assert set(statuses(served.shared, [("GET", path) for path in BESIDE]).values()) == {404}
    assert set(statuses(served.shared, [("GET", path) for path in GUARDED]).values()) == {401}
    assert set(statuses(served.shared, [("HEAD", SEARCH), ("HEAD", "/get-artifact")]).values()) == {
        401
    }


@pytest.mark.cluster
def test_public_routes_reveal_nothing_of_the_store(served: Served) -> None:
    found = {
        path: answered(served.shared, "GET", path) for path in (*PUBLIC, f"{STATIC}index.html")
    }
    assert {status for status, _ in found.values()} == {200}
    assert found["/health"][1] == b"OK"
    for path in PUBLIC - {"/health"}:
        told = json.loads(found[path][1])
        features = told["features_enabled"]
        assert set(told) == TELLS and told["store_type"] == "SqlStore"
        values = [
            *features.values(),
            *(told[name] for name in TELLS - {"store_type", "features_enabled"}),
        ]
        assert {type(value) for value in values} == {bool}
    assert str(served.folder).encode() not in found[f"{STATIC}index.html"][1]


@pytest.mark.cluster
def test_insecure_serves_everyone_but_no_other_site(served: Served) -> None:
    assert f"insecure: anyone who reaches 0.0.0.0:{served.insecure}" in served.warning
    _check_insecure(f"http://127.0.0.1:{served.insecure}")


@pytest.mark.cluster
def test_access_from_another_machine(served: Served, elsewhere: int) -> None:
    """None by default, those with the password beyond that, everybody with --insecure."""
    assert asked((f"http://{HERE}:{served.lone}{SEARCH}", "", {}, None), inside=elsewhere) == [
        "unreachable"
    ]
    _check_password(served, f"http://{HERE}:{served.shared}", elsewhere)
    _check_insecure(f"http://{HERE}:{served.insecure}", elsewhere)


@pytest.mark.cluster
def test_password_is_stored_nowhere_and_users_are_private(served: Served) -> None:
    mlruns, password = served.folder / "mlruns", served.me.partition(":")[2]
    assert all(
        stat.S_IMODE((mlruns / name).stat().st_mode) == 0o600 for name in ("auth.db", "auth.ini")
    )
    assert password.encode() not in b"".join(
        path.read_bytes() for path in mlruns.rglob("*") if path.is_file()
    )


def _check_password(served: Served, address: str, inside: int | None = None) -> None:
    """Nothing without the password; with it, still no other sites' pages and names."""
    own = {"Origin": address, **JSON}
    without = asked(
        (address, "", {}, None),
        (address + SEARCH, "", {}, None),
        (address + SEARCH, "admin:guess", {}, None),
        (address + CREATE, "", own, {"name": "stranger"}),
        (address + "/v1/traces", "", own, {"x": "y"}),
        (address + "/graphql", "", own, {"query": "{}"}),
        (address + "/get-artifact?path=x", "", {}, None),
        (f"{address}{ARTIFACTS}/1", "", {}, None),
        inside=inside,
    )
    assert without == ["401"] * 8
    answers = asked(
        (address + "/health", "", {}, None),
        (address + SEARCH, served.me, {}, None),
        (address + CREATE, served.me, own, {"name": f"mine from {inside}"}),
        (address + SEARCH, served.me, {"Host": "evil.example"}, None),
        (address + CREATE, served.me, EVIL, {"name": "theirs"}),
        inside=inside,
    )
    assert answers == ["200", "200", "200", "403", "403"]


def _check_insecure(address: str, inside: int | None = None) -> None:
    """No password; no other sites' pages and names."""
    answers = asked(
        (address + SEARCH, "", {}, None),
        (address + CREATE, "", {"Origin": address, **JSON}, {"name": f"anybody's from {inside}"}),
        (address + SEARCH, "", {"Host": "evil.example"}, None),
        (address + CREATE, "", EVIL, {"name": "theirs"}),
        inside=inside,
    )
    assert answers == ["200", "200", "403", "403"]


def statuses(port: int, questions: list[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return what a server on this machine answers to methods and paths, without a password."""
    return {(method, path): answered(port, method, path)[0] for method, path in questions}


def answered(port: int, method: str, path: str) -> tuple[int, bytes]:
    """Return the status and the body of an answer; the path goes out as it is, dots and all."""
    body = None if method in ("GET", "HEAD") else "{}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request(
            method, path, body, {"Origin": f"http://127.0.0.1:{port}", **JSON} if body else {}
        )
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_command_beyond_loopback_has_users_and_allowed_hosts() -> None:
    who = server.access(
        "192.0.2.7", 5000, insecure=False, names=(), origins=("https://notes.example",)
    )
    command = server.command(Path("mlruns"), who)
    assert who.authenticated and command[-2:] == ["--app-name", "basic-auth"]
    assert who.names == (
        "localhost",
        "localhost:*",
        "127.0.0.1",
        "127.0.0.1:*",
        "192.0.2.7",
        "192.0.2.7:*",
    )
    assert who.origins == ("http://192.0.2.7:5000", "https://notes.example")
    assert not server.access("192.0.2.7", 5000, insecure=True, names=(), origins=()).authenticated
    named = server.access("0.0.0.0", 5000, insecure=False, names=("box.example:5000",), origins=())
    assert named.names[-1] == "box.example:5000" and "http://box.example:5000" in named.origins


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("192.0.2.7", "192.0.2.7")],
)
def test_address_is_one_that_the_server_has(host: str, address: str) -> None:
    assert server.Access(5000, host).address == f"http://{address}:5000"


def test_a_proxy_is_not_asked_for_the_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with (
        http.server.HTTPServer(("127.0.0.1", 0), Healthy) as healthy,
        subprocess.Popen(["sleep", "60"]) as process,
    ):
        threading.Thread(target=healthy.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{healthy.server_port}"
        assert ui._is_up(process, address, threading.Event())
        process.kill()
        healthy.shutdown()


def test_a_server_that_ends_after_its_start_is_an_error(
    tmp_path: Path,
    empty_database: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copied(empty_database, tmp_path)
    port = free_port()
    short_lived = f"""
import http.server
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", {port}), Healthy).handle_request()
exit(3)
"""
    monkeypatch.setattr(server, "command", lambda *_: [sys.executable, "-c", short_lived])
    assert main(["ui", "--no-open", "--port", str(port), "--dir", str(tmp_path)]) == 1
    assert "MLflow's server ended with exit code 3" in capsys.readouterr().err


def test_errors_of_a_server_that_runs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"a note of its start\n")
    reader = threading.Thread(target=ui._show_errors, args=(os.fdopen(reading, "rb"),))
    reader.start()
    while select.select([reading], [], [], 0)[0]:
        time.sleep(0.01)
    os.write(writing, b"2026/11/28 INFO mlflow: x\nsqlite3.OperationalError: full\n")
    os.close(writing)
    reader.join()
    assert capsys.readouterr().err == "sqlite3.OperationalError: full\n"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_is_this_machine(host: str) -> None:
    assert (
        server.is_loopback(host)
        and not server.access(host, 1, insecure=False, names=(), origins=()).authenticated
    )


def test_invalid_patterns_and_addresses_are_errors() -> None:
    with pytest.raises(UserError, match="no patterns"):
        server.access("0.0.0.0", 1, insecure=False, names=("*",), origins=())
    for host in ("no such host", "x" * 300, "-"):
        with pytest.raises(UserError, match="no address"):
            server.access(host, 1, insecure=False, names=(), origins=())


def test_first_start_creates_the_user_and_later_ones_keep_it(tmp_path: Path) -> None:
    environ, says = server.with_users(tmp_path, {})
    assert environ[server.PASSWORD] in says and len(environ[server.PASSWORD]) >= 12
    own, says = server.with_users(tmp_path, {server.PASSWORD: "correct horse battery"})
    assert "correct" not in says and own[server.PASSWORD] == "correct horse battery"
    (tmp_path / "auth.db").write_bytes(b"users")
    environ, says = server.with_users(tmp_path, {})
    assert server.PASSWORD not in environ and "delete the file" in says
    assert (tmp_path / "auth.db").read_bytes() == b"users"
    with pytest.raises(UserError, match="at least 12"):
        server.with_users(tmp_path / "new", {server.PASSWORD: "short"})


def test_newest_run_is_one_of_the_server_that_is_shown(
    tmp_path: Path, empty_database: Path
) -> None:
    copied(empty_database, tmp_path)
    own = make_folder(tmp_path, uris.default_tracking_uri(tmp_path), name="own")
    append(own, started(), ended())
    assert sync.deliver(own).complete
    there = make_folder(tmp_path, "http://127.0.0.1:9", name="there", experiment="theirs")
    append(there, started(step=5), ended())
    state = delivery_state.load(delivery_state.path_of(own, 0))
    state = dataclasses.replace(state, run_id="1" * 32)
    delivery_state.save(delivery_state.path_of(there, 0), state)
    runs, newest = ui._links(tmp_path, "http://x", empty=False)
    assert runs.startswith("runs: ")
    assert newest.startswith("newest run: ") and f"/runs/{mlflow_id(own)}?" in newest


def test_a_store_without_the_runs_says_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path, "http://server:5000", name="there")
    assert not list(ui._links(tmp_path, "http://x", empty=True))
    assert capsys.readouterr().out == "note: there is in another store: http://server:5000\n"
    make_folder(tmp_path, uris.default_tracking_uri(tmp_path), name="own")
    assert not list(ui._links(tmp_path, "http://x", empty=True))
    assert not capsys.readouterr().out, "a run that is not delivered yet"

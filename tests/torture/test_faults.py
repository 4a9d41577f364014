"""A fault counts only if a request met it, a hang is always found, all variants are tried."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.runs import started, steps
from torture import results
from torture.board import Board
from torture.disk_calls import DiskCalls
from torture.ground import Command, Ground, Turn
from torture.planted import STEPS, expect_broken, run_of
from torture.proxy import EVERYTHING, UPLOADS, Proxy
from torture.results import Result
from torture.scenarios import server, signals


@contextlib.contextmanager
def sleeping(tmp_path: Path, code: str = "import time; time.sleep(60)") -> Iterator[Command]:
    (tmp_path / "output.txt").touch()
    process = subprocess.Popen([sys.executable, "-c", code], text=True)
    try:
        yield Command(process, tmp_path / "output.txt")
    finally:
        process.kill()
        process.wait()


def test_a_command_that_does_not_end_is_a_hang(tmp_path: Path) -> None:
    with sleeping(tmp_path) as command:
        assert command.busy()
        command.deadline_seconds = 0.0
        expect_broken("hang", command.busy)
        expect_broken("hang", command.wait)
    with sleeping(tmp_path, "raise SystemExit(143)") as command:
        expect_broken("wrong status: exit code 143, wanted 75", signals._ends_soon, command, 75)
        late = "hang: the command ended"
        expect_broken(late, signals._ends_soon, command, 143, seconds=-1.0)


@contextlib.contextmanager
def answering() -> Iterator[str]:
    """A server that answers each request with ok."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\nok")
                client.close()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def _asked(uri: str, path: str) -> bytes:
    host, _, port = uri.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        return client.recv(1 << 16)


def test_a_mode_that_no_request_met_is_not_a_fault(place: Ground, tmp_path: Path) -> None:
    with answering() as uri, Proxy(uri) as proxy, sleeping(tmp_path) as command:
        for aim, path, faults in (
            (EVERYTHING, "", []),
            (UPLOADS, "/api", []),
            (UPLOADS, "/mlflow-artifacts/a", [0]),
        ):
            proxy.misbehave("500", aim)
            answer = _asked(proxy.uri, path) if path else b"no request"
            assert (b"oops" in answer) == bool(faults)
            server._until_met(place, command, proxy, seconds=0.1)
            assert len(place.faults) == len(faults)
        assert place.faults == ["server 500 at an upload"]
        proxy.misbehave("close")
        assert _asked(proxy.uri, "/api") == b"" and proxy.behave()
        assert _asked(proxy.uri, "/api").endswith(b"ok") and proxy.behave()


def test_a_lock_that_no_writer_met_is_not_a_fault(place: Ground, tmp_path: Path) -> None:
    run_of(place, started(), steps(1, STEPS))
    with sleeping(tmp_path) as command:
        server._lock(place, command, "waited for", server._holds_up(place), 0.1)
        assert not place.faults
        server._lock(place, command, "refused", lambda delivery: delivery.pending > 0, 0.1)
        assert place.faults == ["database locked, refused"]


SYNCED = """
import os
with open("grows", "w") as file:
    file.write("synced"); file.flush(); os.fsync(file.fileno()); file.write(", lost")
for text in ("first", "second"):
    with open("new", "w") as file:
        file.write(text); file.flush(); os.fsync(file.fileno())
    os.replace("new", "replaced")
    if text == "first":
        os.fsync(os.open(".", os.O_RDONLY))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_power_cut_leaves_what_was_synced(place: Ground) -> None:
    calls, folder = DiskCalls(place), place.runs_folder
    words = [sys.executable, "-c", SYNCED]
    subprocess.run(words, cwd=folder, env=place.environ, check=True)
    assert (folder / "grows").read_text() == "synced, lost"
    assert (folder / "replaced").read_text() == "second"
    assert calls.synced_bytes(folder / "grows") == len("synced")
    calls.cut("dropped", place.random)
    assert (folder / "grows").read_text() == "synced"
    assert (folder / "replaced").read_text() == "first", "the rename was not synced"
    (folder / "grows").write_text("synced, lost")
    calls.cut("zeroed", place.random)
    assert (folder / "grows").read_bytes() == b"synced" + bytes(len(", lost"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        ("write", "EIO", "os.write(os.open('a', os.O_WRONLY | os.O_CREAT), b'abc')"),
        ("write", "half", "assert os.write(os.open('a', os.O_WRONLY | os.O_CREAT), b'abcd') == 2"),
        ("sync", "EIO", "os.fsync(os.open('.', os.O_RDONLY))"),
        ("rename", "ENOSPC", "open('a', 'w').close(); os.replace('a', 'b')"),
        ("open", "EMFILE", "open('a', 'w')"),
        ("mkdir", "ENOSPC", "os.mkdir('a')"),
        ("unlink", "EIO", "open('a', 'w').close(); os.unlink('a')"),
    ],
)
def test_a_call_fails_as_often_as_asked(place: Ground, call: str, error: str, code: str) -> None:
    calls = DiskCalls(place)
    calls.fail(call, error, times=1)
    words = [sys.executable, "-c", f"import os; {code}"]
    done = [
        subprocess.run(
            words, cwd=place.runs_folder, env=place.environ, capture_output=True, check=False
        )
        for _ in range(2)
    ]
    assert calls.met == 1
    assert (error == "half") == (done[0].returncode == 0) and (done[1].returncode == 0) == (
        error != "half"
    )


def test_a_campaign_tries_all_variants_in_an_order_of_its_seed() -> None:
    turns = [Turn(7, number) for number in range(4)]
    drawn = [next(turn.of("abcd")) for turn in turns]
    assert sorted(drawn) == list("abcd")
    pairs = [
        value for turn in turns[:2] for value, _ in zip(turn.of("abcd", 2), range(2), strict=False)
    ]
    assert sorted(pairs) == list("abcd")
    for many, others in ((6, 2), (6, 4), (4, 2), (5, 4), (3, 3)):
        met = [Turn(3, number).pair(range(many), range(others)) for number in range(many * others)]
        assert len(set(met)) == many * others, "each pair occurs once"
        assert {one for one, _ in met[:many]} == set(range(many))
    assert (
        len(
            {
                "".join(next(Turn(seed, number).of("abcd")) for number in range(4))
                for seed in range(9)
            }
        )
        > 1
    )
    assert {fault.number for fault in signals.ONCE} == {
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGUSR1,
    }


def test_processes_of_a_campaign_take_each_scenario_once(tmp_path: Path) -> None:
    one, other = Board(tmp_path), Board(tmp_path)
    assert [one.take(), other.take(), one.take()] == [0, 1, 2]
    one.put(2, Result("signals", 2, ["SIGTERM"], 1.0, None))
    other.put(1, Result("crowd", 1, ["a", "b"], 1.0, "lost: one"))
    assert one.injected() == 3 and [result.seed for result in other.results()] == [1, 2]


def test_a_scenario_that_needs_the_whole_machine_runs_alone(
    tmp_path: Path,
) -> None:
    one, other, order = Board(tmp_path), Board(tmp_path), list[str]()

    def enter(word: str, alone: bool) -> None:
        with other.room(alone=alone):
            order.append(word)

    waiting = [
        threading.Thread(target=enter, args=("alone", True)),
        threading.Thread(target=enter, args=("late", False)),
    ]
    with one.room(alone=False):
        enter("together", False)
        for thread in waiting:
            thread.start()
            time.sleep(0.2)
        order.append("first")
    for thread in waiting:
        thread.join(10)
    assert order == ["together", "first", "alone", "late"]


def test_a_report_has_its_date_and_commit() -> None:
    content = results.report([], 1)
    assert str(content["date"]) <= time.strftime("%Y-%m-%d")
    assert {"commit", "dirty", "fuzz"} <= set(content)

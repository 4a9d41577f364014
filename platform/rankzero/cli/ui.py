"""``rankzero ui [--port P] [--host H]``: MLflow's server on the embedded store; beyond this machine, with passwords."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from types import FrameType

from rankzero.errors import RunFailed, UserError
from rankzero.tracking import catalog, server, store
from rankzero.tracking import progress as delivery

STARTUP_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=5000, help="the port (default: 5000)")
    parser.add_argument(
        "--host", default=server.LOOPBACK,
        help="the address to listen on; beyond this machine (0.0.0.0), people must log in (default: 127.0.0.1)",
    )  # fmt: skip
    parser.add_argument("--insecure", action="store_true", help="let everybody in who reaches the address")
    parser.add_argument(
        "--allowed-hosts", type=_words, default=(), metavar="NAME,…",
        help="what people call this machine in the address line, such as box.example.org:5000 (default: its own names)",
    )  # fmt: skip
    parser.add_argument(
        "--cors-origins", type=_words, default=(), metavar="URL,…", help="other sites whose pages may use the server"
    )


def run(arguments: argparse.Namespace) -> int:
    who = server.access(
        arguments.host, arguments.port, insecure=arguments.insecure,
        names=arguments.allowed_hosts, origins=arguments.cors_origins,
    )  # fmt: skip
    _require_free(who)
    store.prepare_store(store.default_tracking_uri(arguments.dir))
    environ, says = store.server_environment(os.environ), ""
    if who.authenticated:
        environ, says = server.with_users(arguments.dir, environ)
    command = server.command(arguments.dir, who)
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with process, _ended_with_us(process):
        _wait_until_up(process, who.address)
        print(f"MLflow UI: {who.address}  (Ctrl-C ends it)", flush=True)
        print(says or _warning(who), end="\n" if says or _warning(who) else "", flush=True)
        _print_newest(arguments, who.address)
        process.communicate()
    return 0 if process.returncode in (0, -signal.SIGTERM, -signal.SIGINT) else 1


def _warning(who: server.Access) -> str:
    if server.is_loopback(who.host):
        return ""
    return f"insecure: whoever reaches {who.host}:{who.port} can read, change and delete every run"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _require_free(who: server.Access) -> None:
    with socket.socket(socket.AF_INET6 if ":" in who.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((who.host, who.port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {who.port} cannot be used ({error}): choose another, rankzero ui --port {who.port + 1}"
            ) from error


def _wait_until_up(process: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            _, errors = process.communicate()
            raise RunFailed(f"MLflow's server did not start:\n{errors.decode(errors='replace')[-2000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2):
            return
        time.sleep(0.1)
    raise RunFailed(f"MLflow's server did not answer on {address} within {STARTUP_SECONDS:.0f} s")


def _print_newest(arguments: argparse.Namespace, address: str) -> None:
    for one in catalog.listed(arguments.dir / "runs"):
        state = delivery.load(delivery.path_of(one.folder, 0))
        if state.run_id and state.experiment_id:
            print(f"newest run: {store.deep_link(address, state.experiment_id, state.run_id)}", flush=True)
            return


@contextlib.contextmanager
def _ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    def end(_number: int, _frame: FrameType | None) -> None:
        process.terminate()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        process.terminate()
        for number, handler in before.items():
            signal.signal(number, handler)

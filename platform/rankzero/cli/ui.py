"""``rankzero ui [--port P]``: MLflow's server on the embedded store, for this machine only."""

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
from rankzero.tracking import catalog, store
from rankzero.tracking import progress as delivery

STARTUP_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=5000, help="the port on 127.0.0.1 (default: 5000)")


def run(arguments: argparse.Namespace) -> int:
    _require_free(arguments.port)
    store.prepare_store(store.default_tracking_uri(arguments.dir))
    address = f"http://127.0.0.1:{arguments.port}"
    environ = store.server_environment(os.environ)
    command = store.server_command(arguments.dir, arguments.port)
    server = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with server, _ended_with_us(server):
        _wait_until_up(server, address)
        print(f"MLflow UI: {address}  (Ctrl-C ends it)", flush=True)
        _print_newest(arguments, address)
        server.communicate()
    return 0 if server.returncode in (0, -signal.SIGTERM, -signal.SIGINT) else 1


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {port} cannot be used ({error}): choose another, rankzero ui --port {port + 1}"
            ) from error


def _wait_until_up(server: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            _, errors = server.communicate()
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
def _ended_with_us(server: subprocess.Popen[bytes]) -> Iterator[None]:
    def end(_number: int, _frame: FrameType | None) -> None:
        server.terminate()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        server.terminate()
        for number, handler in before.items():
            signal.signal(number, handler)

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from rankzero.catalog import lookup
from rankzero.catalog.summary import Summary
from rankzero.errors import RunFailed, UserError
from rankzero.mlflow_store import saved_view, server, uris
from rankzero.run_store import delivery_state as delivery

STARTUP_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=5000, help="the port (default: 5000)")
    parser.add_argument(
        "--host",
        default=server.LOOPBACK,
        help="the address to listen on; beyond this machine (0.0.0.0), people must log in (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="let everybody in who reaches the address"
    )
    parser.add_argument(
        "--allowed-hosts",
        type=_words,
        default=(),
        metavar="NAME,…",
        help="what people call this machine in the address line, such as box.example.org:5000 (default: its own names)",
    )
    parser.add_argument(
        "--cors-origins",
        type=_words,
        default=(),
        metavar="URL,…",
        help="other sites whose pages may use the server",
    )


def run(arguments: argparse.Namespace) -> int:
    who = server.access(
        arguments.host,
        arguments.port,
        insecure=arguments.insecure,
        names=arguments.allowed_hosts,
        origins=arguments.cors_origins,
    )
    _require_free(who)
    uris.prepare_store(uris.default_tracking_uri(arguments.dir))
    empty = uris.is_empty(arguments.dir / uris.DATABASE)
    environ, says = uris.server_environment(os.environ), ""
    if who.authenticated:
        environ, says = server.with_users(arguments.dir, environ)
    command = server.command(arguments.dir, who)
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    with process, _ended_with_us(process):
        links = list(_links(arguments.dir, who.address, empty))  # meanwhile the server starts
        _wait_until_up(process, who.address)
        print(f"MLflow UI: {who.address}  (Ctrl-C ends it)", flush=True)
        print(says or _warning(who), end="\n" if says or _warning(who) else "", flush=True)
        print(*links, sep="\n", end="\n" if links else "", flush=True)
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
            raise RunFailed(
                f"MLflow's server did not start:\n{errors.decode(errors='replace')[-2000:]}"
            )
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2):
            return
        time.sleep(0.1)
    raise RunFailed(f"MLflow's server did not answer on {address} within {STARTUP_SECONDS:.0f} s")


def _links(root: Path, address: str, empty: bool) -> Iterator[str]:
    """Return where to begin: the runs of the newest run's experiment, with columns that say something; that run."""
    runs = lookup.listed(root / "runs")
    if not runs:
        return
    # An empty store's tables are the server's to make: not by two processes at once.
    found = {} if empty else _save_views(uris.default_tracking_uri(root), runs)
    if runs[0].experiment in found:
        yield f"runs: {uris.runs_link(address, found[runs[0].experiment], saved_view.QUERY)}"
    for one in runs:
        state = delivery.load(delivery.path_of(one.folder, 0))
        if state.run_id and state.experiment_id:
            yield f"newest run: {uris.deep_link(address, state.experiment_id, state.run_id)}"
            return


def _save_views(tracking_uri: str, runs: Sequence[Summary]) -> dict[str, str]:
    """Save the view of every experiment, by its newest run's goal; return the experiments' ids by their names."""
    from rankzero.mlflow_store.client import MlflowRuns

    goals: dict[str, str] = {}
    for one in runs:
        goals[one.experiment] = goals.get(one.experiment) or one.goal
    found: dict[str, str] = {}
    with contextlib.suppress(
        Exception
    ):  # a database that is read-only or another MLflow's: the server says what it is
        tracker = MlflowRuns(tracking_uri)
        for name, goal in goals.items():
            identity = tracker.save_view(
                name, saved_view.TAG, saved_view.tag_value(goal), saved_view.is_ours
            )
            found |= {name: identity} if identity else {}
    return found


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

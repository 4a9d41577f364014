"""``rankzero ui [--port P] [--host H]``: MLflow's server on the embedded store."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from rankzero.catalog import command_lines, lookup
from rankzero.catalog.summary import Summary
from rankzero.cli.display.live import look
from rankzero.errors import RunFailed, UserError
from rankzero.launch.signals import handled_signals
from rankzero.mlflow_store import saved_view, server, uris
from rankzero.run_store import delivery_state as delivery
from rankzero.run_store.folder import write_atomically
from rankzero.tracking import open_run

_STARTUP_SECONDS = 60.0
_SIGNAL_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    port = "the port; 0 takes a free one (default: 5000)"
    parser.add_argument("--port", type=int, default=5000, help=port)
    parser.add_argument(
        "--host",
        default=server.LOOPBACK,
        help="the address to listen on (default: 127.0.0.1); with 0.0.0.0, people must log in",
    )
    anyone = "no login, for anyone who reaches the address"
    parser.add_argument("--insecure", action="store_true", help=anyone)
    names = "this machine's names in browsers, such as box.example.org:5000 (default: its own)"
    parser.add_argument("--allowed-hosts", type=_words, default=(), metavar="NAME,…", help=names)
    page = "open the runs in a browser (default: on a terminal of a desktop)"
    looks = sys.stdout.isatty() and server.has_screen()
    parser.add_argument("--open", action=argparse.BooleanOptionalAction, default=looks, help=page)
    # For rankzero.open_ui, which runs the command: the address that it would open, as JSON.
    parser.add_argument("--result-file", type=Path, help=argparse.SUPPRESS)
    sites = "other sites whose pages may use the server"
    parser.add_argument("--cors-origins", type=_words, default=(), metavar="URL,…", help=sites)


def run(arguments: argparse.Namespace) -> int:
    access = server.access(
        arguments.host,
        arguments.port or _free_port(),
        insecure=arguments.insecure,
        names=arguments.allowed_hosts,
        origins=arguments.cors_origins,
    )
    # MLflow's server reports a port in use with a traceback, after seconds.
    _require_free(access, arguments.dir)
    if not arguments.dir.is_dir():
        raise UserError(_no_store(arguments.dir.absolute()))
    if not os.access(arguments.dir, os.W_OK):
        raise UserError(
            f"you may only read {arguments.dir}, and MLflow's server writes there: ask its owner "
            "for a server's address; `rankzero runs` and `report` only read"
        )
    uris.prepare_store(uris.default_tracking_uri(arguments.dir))
    empty = uris.is_empty(arguments.dir / uris.DATABASE)
    environ, notes = server.environment(os.environ), ""
    # Beyond this machine, people must log in.
    if access.authenticated:
        environ, notes = server.with_users(arguments.dir, environ)
    elif not server.is_loopback(access.host):
        where = f"{access.host}:{access.port}"
        notes = f"insecure: anyone who reaches {where} can read, change and delete every run"
    command = server.command(arguments.dir, access)
    # Its log of requests is of no use here. Its errors explain a server that does not start.
    with (
        server.shared(arguments.dir) as lock,
        # The server keeps the lock if this process is killed and leaves it alone.
        subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(lock,),
        ) as process,
        _ends_with_us(process) as stopping,
    ):
        if arguments.result_file is not None:
            threading.Thread(target=_end_with_program, daemon=True, name="rankzero-program").start()
        links = list(_links(arguments.dir, access.address, empty))  # while the server starts
        if _is_up(process, access.address, stopping):
            _announce(arguments, access.address, links, notes)
        _wait_for_end(process)
    # A server that is stopped while it starts may end with any code.
    if stopping.is_set() or process.returncode in (0, -signal.SIGTERM, -signal.SIGINT):
        return 0
    raise RunFailed(f"MLflow's server ended with exit code {process.returncode}")


def _end_with_program() -> None:
    """End with the program that called `rankzero.open_ui`: it holds our standard input open."""
    sys.stdin.read()
    signal.raise_signal(signal.SIGTERM)


def _announce(arguments: argparse.Namespace, address: str, links: Sequence[str], note: str) -> None:
    """Say where the runs are: on the terminal, to our own program, and in a browser."""
    # The runs first: MLflow's own start page begins with other things.
    lines = [*links, f"MLflow UI: {address}  (Ctrl-C ends it)", note]
    print(*filter(None, lines), sep="\n", flush=True)
    best = links[0].partition(" ")[2] if links else address
    if arguments.result_file is not None:
        write_atomically(arguments.result_file, json.dumps({"address": best}))
    if arguments.open:
        webbrowser.open(best)


def _no_store(root: Path) -> str:
    above = [folder / root.name for folder in root.parents[1:]]
    found = next((folder for folder in above if (folder / uris.DATABASE).exists()), None)
    there = f"there is one in {found}: " if found else "name the folder of your runs: "
    command = command_lines.line(None, "ui", "--dir", str(found or "FOLDER"))
    return (
        f"there is no store in {root}; {there}{command}\n"
        f"to begin with an empty store: {shlex.join(['mkdir', '-p', str(root)])}"
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def _require_free(access: server.Access, root: Path) -> None:
    with socket.socket(socket.AF_INET6 if ":" in access.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((access.host, access.port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {access.port} cannot be used ({error}): take a free one, "
                f"{command_lines.line(root, 'ui', '--port', '0')}"
            ) from error


def _is_up(process: subprocess.Popen[bytes], address: str, stopping: threading.Event) -> bool:
    """Wait until the server answers; return False if it is stopped before that."""
    # A proxy of the environment does not reach this machine's servers.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _STARTUP_SECONDS
    while time.monotonic() < deadline:
        # In this order: the terminal's Ctrl-C reaches the server, too, and it may end at once.
        has_ended = process.poll() is not None
        if stopping.is_set():
            return False
        if has_ended:
            _, errors = process.communicate()
            text = errors.decode(errors="replace")[-2000:]
            raise RunFailed(f"MLflow's server did not start:\n{text}")
        with contextlib.suppress(OSError), direct.open(f"{address}/health", timeout=2):
            return True
        time.sleep(0.1)
    raise RunFailed(f"MLflow's server did not answer on {address} within {_STARTUP_SECONDS:.0f} s")


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Wait, and print what the server complains about."""
    reader = threading.Thread(target=_show_errors, args=(process.stderr,), daemon=True)
    reader.start()
    # A signal that comes just before a call that waits is handled after that call. A wait without
    # a limit would miss it.
    while process.returncode is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_SIGNAL_SECONDS)
    reader.join(_SIGNAL_SECONDS)


def _show_errors(output: IO[bytes]) -> None:
    # The pipe is closed here or at the end. A server that writes into a full one would wait.
    with contextlib.suppress(OSError, ValueError), output:
        os.read(output.fileno(), 1 << 16)  # the notes of its start
        while text := os.read(output.fileno(), 1 << 16):
            for line in text.decode(errors="replace").splitlines():
                if " INFO" not in line:
                    print(line, file=sys.stderr, flush=True)


def _links(root: Path, address: str, empty: bool) -> Iterator[str]:
    """Yield links to the newest run's experiment, in a useful view, and to that run."""
    runs, uri = list[Summary](), uris.default_tracking_uri(root)
    with contextlib.suppress(UserError):  # another program may have locked the store
        known = lookup.listed(root / "runs")
        # Runs of another store have no name in this one.
        runs += (one for one in known if one.mlflow_name)
        if not runs and known and (newest := known[0].folder).identity.tracking_uri != uri:
            print(f"note: {newest.path.name} is in another store: {look(newest)}")
    if not runs:
        return
    # The server makes an empty store's tables. Two processes must not make them at once.
    found = {} if empty else _save_views(uri, runs)
    base, kind = f"{address}/#/experiments", "workflowType=machine_learning"
    if experiment_id := found.get(runs[0].experiment):
        yield f"runs: {base}/{experiment_id}/runs?{kind}&{saved_view.QUERY}"
    for one in runs:
        state = delivery.load(delivery.path_of(one.folder, 0))
        if state.run_id and state.experiment_id:
            yield f"newest run: {base}/{state.experiment_id}/runs/{state.run_id}?{kind}"
            return


def _save_views(tracking_uri: str, runs: Sequence[Summary]) -> dict[str, str]:
    """Save each experiment's view, for its newest run's goal; return their ids by name."""
    goals: dict[str, str] = {}
    for one in runs:
        goals[one.experiment] = goals.get(one.experiment) or one.goal
    found: dict[str, str] = {}
    # A database may be read-only, or of another MLflow version. The server reports that itself.
    with contextlib.suppress(Exception):
        tracker = open_run.connect(tracking_uri)
        for name, goal in goals.items():
            identity = tracker.save_view(name, goal)
            found |= {name: identity} if identity else {}
    return found


@contextlib.contextmanager
def _ends_with_us(process: subprocess.Popen[bytes]) -> Iterator[threading.Event]:
    """Stop the server when this process is; yield whether it was, by a signal."""
    stopping = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stopping.set()
        process.terminate()

    # Without a handler SIGTERM would end this process and leave the server running.
    numbers = signal.SIGTERM, signal.SIGINT, *handled_signals([signal.SIGHUP])
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield stopping
    finally:
        process.terminate()
        for number, handler in before.items():
            signal.signal(number, handler)

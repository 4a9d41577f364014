"""Hosts as actors of a Ray cluster: ``python -m rankzero.tuning.places.ray_actor``.

A host of several machines has an actor on each, in a placement group: Ray starts all or none.

    search ── standard input and output ──▶ this program ── Ray ──▶ actor ── pipe ──▶ places.node

It does for Ray what `srun` does for Slurm. Ray places the actor, and ends it with this program.
`rankzero train --ray` has its own command in the node's place: its output is shown, and signals are
passed on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero import config
from rankzero.errors import FINISHED, NOT_DELIVERED, RESUMABLE, UserError
from rankzero.launch.signals import handled_signals

_CHUNK_BYTES = 1 << 20
_MOST_ERROR_BYTES = 2000
_CONNECT_SECONDS = 10.0
_SIGNAL_SECONDS = 0.5
_PATIENCE_SECONDS = 5.0
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_NO_FAILURES = (FINISHED, NOT_DELIVERED, RESUMABLE)
_NODE = "rankzero.tuning.places.node"
_THREADS = "OMP_NUM_THREADS"
# Ray gives the actor some of its machine's GPUs. Those of the search's machine are others.
_OF_ONE_MACHINE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# With another value the connection would hang, or the actor outlive the search.
_OWN = {"lifetime", "max_concurrency", "max_restarts", "name"}
# A placement group decides on the machines of a trial with several.
_OWN_OF_GROUPS = {"label_selector", "placement_group", "scheduling_strategy"}


def command(
    address: str,
    options: Sequence[str],
    processes: int,
    machines: int = 1,
    training: Sequence[str] = (),
) -> list[str]:
    """Return the command that starts a host, or a `training`. Raises UserError without Ray.

    `options`: of each actor, such as ``num_cpus=4``. `processes`: of each trial on each of its
    `machines`; an actor has a processor for each by default, and a GPU where the cluster has some.
    `training`: the words after ``python`` that each machine runs instead.
    """
    own_choices = _OWN | (_OWN_OF_GROUPS if machines > 1 else set())
    if taken := sorted(own_choices & config.parse_assignments(options).keys()):
        raise UserError(f"{taken[0]} of the actors is RankZero's own choice: leave it out")
    if importlib.util.find_spec("ray") is None:
        raise UserError("--ray needs Ray: pip install 'rankzero[ray]'")
    own = ["--address", address, "--processes", str(processes), "--machines", str(machines)]
    own += ["--training", json.dumps(training)] if training else []
    program = [sys.executable, "-P", "-m", "rankzero.tuning.places.ray_actor"]
    return [*program, *own, "--", *options]


class Node:
    """Holds the node process on its machine. Ray runs its methods there, two at a time."""

    def address(self) -> str:
        """Return the address of its machine, as Ray knows it."""
        import ray

        address = str(ray.util.get_node_ip_address())
        return f"[{address}]" if ":" in address else address

    def start(
        self, folder: str, environ: Mapping[str, str], processes: int, words: Sequence[str]
    ) -> None:
        """Start ``python -P`` with these words, and with the caller's folder and variables.

        A training shows its errors, and stops if the actor is killed.
        """
        trains = _NODE not in words
        setpriv = shutil.which("setpriv") if trains else None
        prefix = () if setpriv is None else (setpriv, "--pdeathsig", "TERM")
        # Ray sets it for one process with all the actor's processors. A user's may be a list.
        threads = max(1, int(os.environ.get(_THREADS, "1").partition(",")[0]) // processes)
        own = {_THREADS: environ.get(_THREADS, str(threads))}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - It lives as long as the node.
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-P", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if trains else self._errors,
            cwd=folder if Path(folder).is_dir() else None,
            env={**environ, **os.environ, **own},
        )

    def write(self, content: bytes) -> None:
        """Pass a part of the search's messages on; nothing: its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(content)
        self._process.stdin.flush()
        if not content:
            self._process.stdin.close()

    def read(self) -> bytes:
        """Return a part of the node's messages, once there is one; nothing: their end."""
        assert self._process.stdout is not None
        return os.read(self._process.stdout.fileno(), _CHUNK_BYTES)

    def stop(self) -> None:
        """Ask the training to stop, as Ctrl-C does."""
        # Ray's workers ignore SIGINT, and so do their children.
        self._process.terminate()

    def end(self) -> tuple[int, str]:
        """Return the node's exit status, and its last words, once it has ended."""
        status = self._process.wait()
        self._errors.seek(0)
        return status, self._errors.read()[-_MOST_ERROR_BYTES:].decode(errors="replace").strip()


def main() -> int:
    """Connect the search with a node in each actor, until one of them fails or all have ended."""
    arguments, output = _parse(), os.dup(1)
    # Words of Ray are no message.
    os.dup2(2, 1)
    import ray

    try:
        _refuse_unreachable(arguments.address)
        ray.init(arguments.address, log_to_driver=False, logging_level="error")
        with _waiting(bool(arguments.training)):
            nodes = _start(ray, arguments)
        received = list[int]()
        if arguments.training:
            for one in handled_signals(_STOP):
                signal.signal(one, lambda number, _: received.append(number))
        else:
            threading.Thread(target=_pass_on, args=(ray.get, nodes), daemon=True).start()
        ends = _pass_back(ray, nodes, output, received, trains=bool(arguments.training))
        # A machine may stop with a checkpoint because another has failed.
        status, words = max(ends, key=lambda end: (end[0] not in _NO_FAILURES, abs(end[0])))
    except (KeyboardInterrupt, SystemExit):
        status, words = 1, "interrupted"
    except Exception as error:
        # The search quotes it.
        status, words = 1, f"{arguments.address}: {type(error).__name__}: {error}"
    print(words, end="\n" if words else "", file=sys.stderr, flush=True)
    return status if status >= 0 else 128 - status  # as a shell reports a signal


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ray_actor")
    parser.add_argument("--address", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--training", type=json.loads, default=[])
    parser.add_argument("options", nargs="*")
    return parser.parse_args()


@contextlib.contextmanager
def _waiting(shows: bool) -> Iterator[None]:
    """Print after some seconds that a training waits for its machines. A search does so itself."""
    words = ("waiting for machines of Ray: `ray status` shows why",)
    timer = threading.Timer(_PATIENCE_SECONDS, print, words, {"file": sys.stderr, "flush": True})
    if shows:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _refuse_unreachable(address: str) -> None:
    """Raise OSError if nothing answers at a ``HOST:PORT``. Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            pass


def _start(ray: Any, arguments: argparse.Namespace) -> list[Any]:
    """Start a node in each of the actors. Waits for their resources."""
    processes, count = arguments.processes, arguments.machines
    chosen: dict[str, Any] = {"num_cpus": processes, "max_restarts": 0, "max_concurrency": 2}
    if ray.cluster_resources().get("GPU"):
        chosen["num_gpus"] = processes
    elif arguments.training and "num_gpus" not in config.parse_assignments(arguments.options):
        line = "the cluster has no GPU now: training without. To wait for GPUs, add"
        print(f"{line} `-- num_gpus={processes}`", file=sys.stderr, flush=True)
    for name, text in config.parse_assignments(arguments.options).items():
        chosen[name] = text
        with contextlib.suppress(ValueError):
            chosen[name] = json.loads(text)
    places: list[dict[str, Any]] = [{}] if count == 1 else _machines(ray, chosen, count)
    nodes = [ray.remote(Node).options(**chosen, **place).remote() for place in places]
    first, job = ray.get(nodes[0].address.remote()), secrets.token_hex(8)
    own = {name: text for name, text in os.environ.items() if name not in _OF_ONE_MACHINE}
    words = [*arguments.training] or ["-m", _NODE, f"--machines={count}", "--first", first]
    if "train" in arguments.training[:3] and count == 1:
        words += ["--nnodes", "1"]  # Variables of Slurm that the actor has mean other machines.
    elif arguments.training and count > 1:
        port = 20_000 + secrets.randbelow(10_000)  # below those that Linux gives to clients
        words += ["--nnodes", str(count), "--rdzv-endpoint", f"{first}:{port}", "--rdzv-id", job]
    each = [
        words if arguments.training else [*words, "--job", job, "--number", str(number)]
        for number in range(count)
    ]
    folder = str(Path.cwd())
    started = zip(nodes, each, strict=True)
    ray.get([node.start.remote(folder, own, processes, words) for node, words in started])
    return nodes


def _machines(ray: Any, chosen: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the option that puts each actor on a machine of its own."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = {"CPU": chosen["num_cpus"], "GPU": chosen.get("num_gpus", 0)}
    needs |= {"memory": chosen.get("memory", 0), **chosen.get("resources", {})}
    if kind := chosen.get("accelerator_type"):
        needs[f"accelerator_type:{kind}"] = 0.001  # as Ray itself asks for it
    # A group cannot ask for nothing.
    bundle = {name: amount for name, amount in needs.items() if amount} or {"CPU": 0.001}
    group = placement_group([bundle] * count, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    return [
        {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=number
            )
        }
        for number in range(count)
    ]


def _pass_on(get: Callable[[Any], None], nodes: Sequence[Any]) -> None:
    """Pass the search's messages on to all nodes. One part at a time: actors have two threads."""
    content = b"a first part"
    while content:
        try:
            content = os.read(0, _CHUNK_BYTES)
        except ConnectionError:  # The search died, and left messages unread.
            content = b""
        try:
            get([node.write.remote(content) for node in nodes])
        except Exception:
            return  # The other direction reports the actor's end.


def _pass_back(
    ray: Any, nodes: Sequence[Any], output: int, received: list[int], *, trains: bool
) -> list[tuple[int, str]]:
    """Pass the nodes' output on in whole lines, and signals to them; return how they ended.

    A node that fails ends the others. A training does not: its ranks agree on the end.
    """
    left = [b"" for _ in nodes]
    reads = {node.read.remote(): number for number, node in enumerate(nodes)}
    ends: list[tuple[int, str]] = []
    while reads:
        while received:
            received.pop()
            ray.get([node.stop.remote() for node in nodes])
        # A handler of Python may have to wait for the end of a call.
        ready, _ = ray.wait(list(reads), timeout=_SIGNAL_SECONDS)
        if not ready:
            continue
        number, content = reads.pop(ready[0]), ray.get(ready[0])
        if not content:
            ends.append(ray.get(nodes[number].end.remote()))
            _write(output, left[number], trains)
            if ends[-1][0] and not trains:
                break
            continue
        if not trains:
            # The node ends with its input, and cleans up. Ray would kill it.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lines, newline, left[number] = (left[number] + content).rpartition(b"\n")
        _write(output, lines + newline, trains)
        reads[nodes[number].read.remote()] = number
    return ends


def _write(output: int, content: bytes, trains: bool) -> None:
    left = memoryview(content)
    try:
        while left:
            left = left[os.write(output, left) :]
    except OSError:
        # The reader has gone, as in `| head`. A training goes on without it.
        if not trains:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)


if __name__ == "__main__":
    # Ray's own threads may wait for the machine that is gone.
    os._exit(main())

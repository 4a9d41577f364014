"""Hosts as actors of a Ray cluster: ``python -m rankzero.tuning.places.ray_actor``.

A host of several machines has an actor on each, in a placement group: Ray starts all or none.

    search ── standard input and output ──▶ this program ── Ray ──▶ actor ── pipe ──▶ places.node

It does for Ray what `srun` does for Slurm. Ray places the actor, and ends it with this program.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero import config
from rankzero.errors import UserError

_CHUNK_BYTES = 1 << 20
_MOST_ERROR_BYTES = 2000
_CONNECT_SECONDS = 10.0
_THREADS = "OMP_NUM_THREADS"
# Ray gives the actor some of its machine's GPUs. Those of the search's machine are others.
_OF_ONE_MACHINE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# With another value the connection would hang, or the actor outlive the search.
_OWN = {"lifetime", "max_concurrency", "max_restarts", "name"}
# A placement group decides on the machines of a trial with several.
_OWN_OF_GROUPS = {"label_selector", "placement_group", "scheduling_strategy"}


def command(address: str, options: Sequence[str], processes: int, machines: int = 1) -> list[str]:
    """Return the command that starts a host. Raises UserError without Ray.

    `options`: of each actor, such as ``num_cpus=4``. `processes`: of each trial on each of its
    `machines`; an actor has a processor for each by default, and a GPU where the cluster has some.
    """
    own_choices = _OWN | (_OWN_OF_GROUPS if machines > 1 else set())
    if taken := sorted(own_choices & config.parse_assignments(options).keys()):
        raise UserError(f"{taken[0]} of the actors is RankZero's own choice: leave it out")
    if importlib.util.find_spec("ray") is None:
        raise UserError("--ray needs Ray: pip install 'rankzero[ray]'")
    own = ["--address", address, "--processes", str(processes), "--machines", str(machines)]
    return [sys.executable, "-m", "rankzero.tuning.places.ray_actor", *own, "--", *options]


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
        """Start the node with the search's folder and variables, as `srun` does.

        `words`: of the node's command.
        """
        # Ray sets it for one process with all the actor's processors.
        threads = max(1, int(os.environ.get(_THREADS, "1")) // processes)
        own = {_THREADS: environ.get(_THREADS, str(threads))}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - It lives as long as the node.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rankzero.tuning.places.node", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            cwd=folder if Path(folder).is_dir() else None,
            env={**environ, **os.environ, **own},
        )

    def write(self, content: bytes) -> None:
        """Pass a part of the search's messages on; nothing: its end."""
        assert self._process.stdin is not None
        left = memoryview(content)
        while left:
            left = left[os.write(self._process.stdin.fileno(), left) :]
        if not content:
            self._process.stdin.close()

    def read(self) -> bytes:
        """Return a part of the node's messages, once there is one; nothing: their end."""
        assert self._process.stdout is not None
        return os.read(self._process.stdout.fileno(), _CHUNK_BYTES)

    def end(self) -> tuple[int, str]:
        """Return the node's exit status, and its last words, once it has ended."""
        status = self._process.wait()
        self._errors.seek(0)
        return status, self._errors.read()[-_MOST_ERROR_BYTES:].decode(errors="replace").strip()


def main() -> int:
    """Connect the search with a node in each actor, until one of them fails or all have ended."""
    parser = argparse.ArgumentParser(prog="ray_actor")
    parser.add_argument("--address", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    output = os.dup(1)
    # Words of Ray are no message.
    os.dup2(2, 1)
    import ray

    try:
        _refuse_unreachable(arguments.address)
        ray.init(arguments.address, log_to_driver=False, logging_level="error")
        nodes = _start(ray, arguments)
        threading.Thread(target=_pass_on, args=(ray.get, nodes), daemon=True).start()
        status, words = _pass_back(ray, nodes, output)
    except Exception as error:
        # The search quotes it.
        status, words = 1, f"{arguments.address}: {type(error).__name__}: {error}"
    print(words, file=sys.stderr, flush=True)
    return int(status)


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
    given = config.parse_assignments(arguments.options)
    chosen.update((name, _value(text)) for name, text in given.items())
    places: list[dict[str, Any]] = [{}] if count == 1 else _machines(ray, chosen, count)
    nodes = [ray.remote(Node).options(**chosen, **place).remote() for place in places]
    meeting: list[str] = []
    if count > 1:
        meeting = ["--first", ray.get(nodes[0].address.remote()), "--job", secrets.token_hex(8)]
    own = {name: text for name, text in os.environ.items() if name not in _OF_ONE_MACHINE}
    words = [f"--machines={count}", *meeting]
    ray.get(
        [
            node.start.remote(str(Path.cwd()), own, processes, [*words, f"--number={number}"])
            for number, node in enumerate(nodes)
        ]
    )
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


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


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


def _pass_back(ray: Any, nodes: Sequence[Any], output: int) -> tuple[int, str]:
    """Pass the nodes' messages on to the search, in whole lines; return how they ended."""
    left = [b"" for _ in nodes]
    reads = {node.read.remote(): number for number, node in enumerate(nodes)}
    ends: list[tuple[int, str]] = []
    while reads:
        (done, *_), _ = ray.wait(list(reads))
        number, content = reads.pop(done), ray.get(done)
        if not content:
            ends.append(ray.get(nodes[number].end.remote()))
            if ends[-1][0]:
                break
            continue
        # The node ends with its input, and cleans up. Ray would kill it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lines, newline, left[number] = (left[number] + content).rpartition(b"\n")
        whole = memoryview(lines + newline)
        while whole:
            whole = whole[os.write(output, whole) :]
        reads[nodes[number].read.remote()] = number
    return ends[-1]


if __name__ == "__main__":
    # Ray's own threads may wait for the machine that is gone.
    os._exit(main())

"""One of two machines, which are namespaces: meets the other at each endpoint, prints a line each.

A program of its own: `python -m support.two_machines FOLDER ENDPOINT…`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rankzero.launch import agent
from rankzero.launch.machines import Machines, meet
from rankzero.launch.signals import SignalForwarder
from rankzero.ranks import detect
from rankzero.training.distributed.world import join

# Debian's installer gives a machine's own name an address that nobody else reaches.
SCRIPT = """
set -e
printf '127.0.0.1 localhost\\n127.0.1.1 first\\n' > hosts.first
printf '127.0.0.1 localhost\\n127.0.1.1 second\\n10.77.0.1 first\\n' > hosts.second
hostname first
ip link set lo up
mount --bind hosts.first /etc/hosts
unshare --net --uts --mount sh -c '
  hostname second
  ip link set lo up
  mount --bind hosts.second /etc/hosts
  until ip -o address show dev eth0 2>&1 | grep -q 10.77; do sleep 0.02; done
  exec "$@"' sh "$@" > second.json &
second=$!
until [ "$(readlink /proc/$second/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link add eth0 type veth peer name eth0 netns $second
inside="nsenter --target $second --net"
ip address add fd77::1/64 dev eth0 nodad
ip address add 10.77.0.1/24 dev eth0
ip link set eth0 up
$inside ip link set eth0 up
$inside ip address add fd77::2/64 dev eth0 nodad
$inside ip address add 10.77.0.2/24 dev eth0
"$@" > first.json
wait $second
"""
NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "bash", "-c")


@pytest.fixture
def namespaces() -> None:
    """Skip the test where this user may not make namespaces."""
    tried = (*NAMESPACES, "ip link add eth0 type veth peer name eth1")
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("two machines: this system has no unshare or no ip")
    if (made := subprocess.run(tried, check=False, capture_output=True, text=True)).returncode:
        pytest.skip(f"two machines: this user may not make namespaces ({made.stderr.strip()})")


def add_up(name: str) -> str:
    """Add the ranks up; return the sum. Every rank's worker calls it."""
    ranks = detect()
    with join(ranks, lambda _: torch.device("cpu")):
        total = torch.tensor(ranks.rank + 1)
        dist.all_reduce(total)
    return f"{name} {int(total)} {os.environ['MASTER_ADDR']}"


def main(folder: Path, endpoints: list[str]) -> None:
    for endpoint in endpoints:
        machines = meet(Machines(2, 2, endpoint, endpoint, None, {"join_timeout": "60"}))
        numbers: list[int] = []
        with SignalForwarder() as signals:
            result = agent.run(
                agent.Topology(1, machines=machines),
                add_up,
                machines.interface,
                folder / "logs",
                signals,
                numbers.append,
            )
        print(json.dumps([endpoint, machines.address, result.status, numbers]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

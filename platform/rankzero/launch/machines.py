"""The machines of a run: how many, where they meet, and by which address others reach this one.

Kubeflow and torchrun give them in variables ``PET_…``, Slurm in variables of its step. Imports no
PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import socket
import time
import zlib
from collections.abc import Mapping
from typing import Any

import psutil

from rankzero.errors import UserError

DEFAULT_PORT = 29400
# torchrun's `join_timeout`.
DEFAULT_JOIN_SECONDS = "600"
# The beginning of the names of torchrun's variables.
OF_TORCHRUN = "PET_"
# A name of a service may take this long to appear, as in Kubernetes.
_NAME_SECONDS = 60.0
_ANSWER_SECONDS = 3.0
# Addresses of documentation (RFC 5737, RFC 3849): only their route is asked for.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")
_NODE_LIST = re.compile(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?")

# torchrun's settings of the rendezvous, and the values that it can read.
_SETTINGS = {
    **dict.fromkeys(("close_timeout", "heartbeat", "join_timeout", "read_timeout"), r"\d+"),
    **dict.fromkeys(("keep_alive_interval", "keep_alive_max_attempt", "last_call_timeout"), r"\d+"),
    "cas_backoff_max_seconds": r"\d+(\.\d+)?",
    "is_host": "(?i)true|false|yes|no|[tfyn01]",
}
_TRUE = ("true", "t", "yes", "y", "1")


@dataclasses.dataclass(frozen=True)
class Machines:
    """Machines that train one run together. The default is this one alone."""

    least: int = 1
    most: int = 1
    endpoint: str = "localhost:0"
    """The rendezvous, ``host:port``."""
    job: str = "rankzero"
    """The name by which machines of one job find each other."""
    address: str | None = "localhost"
    """This machine's address, for the others."""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """torchrun's settings of the rendezvous."""
    number: int | None = None
    """This machine's among them, if its launcher gives it: 0 serves the rendezvous."""

    @property
    def alone(self) -> bool:
        """Whether this machine is the only one."""
        return self.most == 1

    def of_part(self, number: int) -> Machines:
        """Return the same machines for one of several trainings, which meet at its own port."""
        job = f"{self.job}.{number}"
        host, _ = _divided(self.endpoint)
        return dataclasses.replace(self, job=job, endpoint=joined(host, _port_of(job)))

    def is_served(self) -> bool:
        """Return whether something answers at the rendezvous now."""
        place = _divided(self.endpoint)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(place, timeout=_ANSWER_SECONDS),
        ):
            return True
        return False

    @property
    def interface(self) -> str | None:
        """The network interface that has the address, or None if it is not known."""
        for name, addresses in psutil.net_if_addrs().items():
            if any(one.address.partition("%")[0] == self.address for one in addresses):
                return name
        return None


def count_of(text: str) -> tuple[int, int]:
    """Return the least and the greatest number of machines in ``N`` or ``MIN:MAX``."""
    least, _, most = text.partition(":")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(f"{text!r} is neither N nor MIN:MAX, of at least 1")
    return found


def meet(machines: Machines, name_seconds: float = _NAME_SECONDS) -> Machines:
    """Return `machines` with this machine's address and with who serves the rendezvous.

    An address or settings that are there already stay. Raises UserError if no address can be found.
    """
    if machines.alone:
        return machines
    settings, number = _checked(machines.settings), machines.number
    host, port = _divided(machines.endpoint)
    # Kubernetes gives the first pod a name as it starts: another may have waited for long by then.
    patience = float(settings.get("join_timeout", name_seconds))
    source, target = _route(host, port, 0.0 if number == 0 else patience)
    serves = source == target or _is_loopback(target) if number is None else number == 0
    endpoint = joined(host, port)
    if "is_host" in settings:  # such as behind a NAT
        serves = settings["is_host"].strip().lower() in _TRUE
    elif serves:
        # torchrun compares host names and the addresses that they have in /etc/hosts. Debian writes
        # 127.0.1.1 there. With "localhost", a second process of this machine joins the first.
        endpoint = f"localhost:{port}"
    else:
        settings["is_host"] = "false"
    if not serves:
        # torchrun's default is a minute. The first machine may read a large checkpoint before.
        settings.setdefault("read_timeout", settings.get("join_timeout", DEFAULT_JOIN_SECONDS))
    address = machines.address or source
    if not address or (_is_loopback(address) and not (_is_loopback(host) or machines.address)):
        address = _address_outwards(host)
    if serves and number is None:
        number = 0
    return dataclasses.replace(
        machines, endpoint=endpoint, address=address, settings=settings, number=number
    )


def _checked(settings: Mapping[str, str]) -> dict[str, str]:
    for name, value in settings.items():
        if name not in _SETTINGS:
            raise UserError(f"--rdzv-conf has no {name}; it has {', '.join(_SETTINGS)}")
        if not re.fullmatch(_SETTINGS[name], value.strip()):
            form = "true or false" if name == "is_host" else "a number"
            raise UserError(f"--rdzv-conf {name}={value}: give {form}")
    return dict(settings)


ALONE = Machines()

# Variables of launchers that start a process for each device: its number on its machine, and how
# many processes there are. RANK and WORLD_SIZE without LOCAL_RANK are Kubeflow's, for machines.
_LAUNCHERS = (
    ("LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("HOROVOD_LOCAL_RANK", "HOROVOD_SIZE"),
    ("MPI_LOCALRANKID", "PMI_SIZE"),
)


def refuse_launcher(environ: Mapping[str, str]) -> None:
    """Raise UserError if torchrun, mpirun or the like has started this command several times."""
    for local, size in _LAUNCHERS:
        count = environ.get(size, "")
        if local in environ and count.isdecimal() and int(count) > 1:
            raise UserError(
                f"a launcher such as torchrun starts this command {count} times ({size}), and "
                "RankZero starts a machine's processes itself: run it without the launcher, with "
                "--nproc for the processes; for a run of each process, add --nnodes 1"
            )


def of_slurm(environ: Mapping[str, str], *, typed: bool = False) -> Machines | None:
    """Return the machines of this Slurm step, or None if this command is the only one of it.

    `typed`: see `is_typed`. Raises UserError for a step with several tasks on a machine.
    """
    # The script of a job is no task. The first task of `srun --pty` may be a shell. Those of the
    # other tasks have no terminal, and have ended.
    if "SLURM_STEP_ID" not in environ or typed:
        return None
    try:
        tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
        if tasks == 1:
            return None
        nodes, number = int(environ["SLURM_STEP_NUM_NODES"]), int(environ["SLURM_NODEID"])
        first = _first_host(environ["SLURM_STEP_NODELIST"])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"cannot read the variables of this Slurm step ({error}): give --nnodes and "
            "--rdzv-endpoint"
        ) from error
    if tasks != nodes:
        raise UserError(
            f"this Slurm step starts the command {tasks} times on {nodes} machines, and RankZero "
            "starts a machine's processes itself: srun --ntasks-per-node=1, with --nproc for the "
            "processes; for a run of each task, add --nnodes 1"
        )
    # A job that is requeued must not join the rendezvous of its last start.
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}.{restart}"
    return Machines(nodes, nodes, f"{first}:{_port_of(job)}", job, None, number=number)


def is_typed() -> bool:
    """Return whether a shell with a terminal runs this command, as one of its own jobs."""
    return os.isatty(0) and os.getpgrp() != os.getsid(0)


def _first_host(listed: str) -> str:
    """Return the first machine of a list such as ``gpu[01-03,7],login``. Raises ValueError."""
    found = _NODE_LIST.match(listed)
    if found is None:
        raise ValueError(f"no machine in {listed!r}")
    return "".join(part or "" for part in found.groups())


def _port_of(job: str) -> int:
    # Below the ports that Linux gives to clients.
    return 20_000 + zlib.crc32(job.encode()) % 10_000


def _divided(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(DEFAULT_PORT)
    # The last part of an IPv6 address without brackets may be a port as well.
    if not port.isdecimal() or (colon and _is_address(endpoint)):
        raise UserError(f"--rdzv-endpoint {endpoint}: write HOST:PORT or [ADDRESS]:PORT")
    return host.strip("[]"), int(port)


def joined(host: str, port: object) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _route(host: str, port: int, seconds: float) -> tuple[str | None, str]:
    """Return the address from which this machine reaches a host, and the host's.

    Waits at most `seconds` for a name that nobody knows yet. Raises UserError then.
    """
    try:
        found = _addresses(host, port, seconds)
    except (OSError, UnicodeError) as error:
        if seconds == 0.0:
            return None, host
        raise UserError(f"--rdzv-endpoint: no machine is called {host} ({error})") from error
    for family, kind, protocol, _, address in found:
        # Connecting a datagram socket chooses the route, and sends nothing.
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]), str(address[0])
    raise UserError(f"this machine has no route to {host}, which --rdzv-endpoint names")


def _addresses(host: str, port: int, seconds: float) -> list[Any]:
    until = time.monotonic() + seconds
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError):
            if time.monotonic() >= until:
                raise
            time.sleep(0.5)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _address_outwards(host: str) -> str:
    """Return an address of this machine that is not its loopback's."""
    for outside in _OUTSIDE:
        with contextlib.suppress(UserError):
            source, _ = _route(outside, 9, 1.0)
            if source and not _is_loopback(source):
                return source
    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    found = [
        one.address
        for name in up
        for one in psutil.net_if_addrs().get(name, [])
        if one.family == socket.AF_INET and not _is_loopback(one.address)
    ]
    if len(found) == 1:
        return str(found[0])
    raise UserError(
        f"{host} is a loopback address on this machine, so the others would not reach it: give "
        f"--local-addr, one of {', '.join(found) or 'this machine'}"
    )

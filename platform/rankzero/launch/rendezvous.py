"""How the processes of one machine find each other, out of reach for everybody else.

PyTorch's TCP stores listen without a password, and torchrun's rendezvous unpickles what it finds
in its store: anyone who reaches the port could run code. Only jobs of several machines use them,
see docs/guarantees.md. On one machine the launcher's store is its own memory, and the ranks' store
is a file in a folder that only their user may enter.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rankzero.errors import UserError
from rankzero.ranks import Ranks

_LOOPBACK_INTERFACES = ("lo", "lo0")
_STORE_FOLDER = "RANKZERO_STORE"
# None is $TMPDIR. The others are on this machine, but a logout may empty the first of them.
PLACES = (None, "/dev/shm", "/var/tmp")  # noqa: S108 — the names in them are random
# More than the addresses of a machine's ranks need.
_STORE_BYTES = 64 << 10
# The kernel takes no more: 25 days.
_MOST_MILLISECONDS = 2**31 - 1


def handler_of_one_agent(parameters: Any) -> Any:
    """Return a rendezvous handler for a single agent: its store is this process's memory."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    store = _distributed().HashStore()
    return create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)


def limit_silence(endpoint: str, seconds: float | None) -> None:
    """Let the kernel end this process's connections to ``HOST:PORT`` after so long a silence.

    torchrun's agent writes to its rendezvous every few seconds and waits for an answer without a
    limit. Over a link that is cut, Linux would report no error for a quarter of an hour. The agent
    would not see meanwhile that its ranks have ended. None: no limit.
    """
    if seconds is None or sys.platform != "linux":
        return
    port = endpoint.rpartition(":")[2]
    for one in psutil.Process().net_connections("tcp"):
        if one.raddr and str(one.raddr.port) == port:
            # PyTorch owns the descriptor, and does not show it.
            with socket.socket(fileno=os.dup(one.fd)) as connection:
                milliseconds = int(min(1000 * seconds, _MOST_MILLISECONDS))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


@contextlib.contextmanager
def private_folder(places: Sequence[str | None] = PLACES) -> Iterator[str]:
    """Create a folder for the ranks' stores, which only this user may enter; remove it at the end.

    Its name is random. It is in the first of `places` that has locks and room. Raises UserError.
    """
    refusals = []
    for place in places:
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(
                    tempfile.TemporaryDirectory("", "rankzero-", place, ignore_cleanup_errors=True)
                )
                # A store locks its file and writes it. $TMPDIR may be a network disk, or full.
                check = Path(folder) / "check"
                with check.open("wb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    file.write(bytes(_STORE_BYTES))
                check.unlink()
            except OSError as error:
                refusals.append(f"{place or '$TMPDIR'}: {error}")
                continue
            # systemd-tmpfiles deletes old files in the temporary folder, except below a locked one.
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield folder
            return
    raise UserError(
        f"no folder through which the ranks could find each other ({'; '.join(refusals)}): "
        "set TMPDIR to a folder of a local disk with room"
    )


def use_folder(folder: str | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let this rank find the others through `folder`, a `private_folder` of their launcher.

    None: the job has several machines.
    """
    environ.pop(_STORE_FOLDER, None)
    if folder is not None:
        environ[_STORE_FOLDER] = folder


def private_store(
    ranks: Ranks, timeout: datetime.timedelta, environ: Mapping[str, str] = os.environ
) -> Any:
    """Return the store of this start of a job on one machine, a file in its private folder."""
    # A restarted rank must not read the addresses of dead ones.
    start = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    path = Path(environ[_STORE_FOLDER]) / f"start_{start}"
    store = _distributed().FileStore(str(path), ranks.world_size)
    store.set_timeout(timeout)
    return store


def shared_store(ranks: Ranks, timeout: datetime.timedelta) -> Any:
    """Return the store of this start of a job on several machines, as PyTorch opens it itself."""
    distributed = _distributed()
    place = distributed.rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout)
    store, _, _ = next(place)
    store.set_timeout(timeout)
    return distributed.PrefixStore("default_pg", store)


def is_one_machine(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether all ranks are on this machine, started by one launcher of ours."""
    return _STORE_FOLDER in environ


def keep_gloo_on_loopback(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo use the loopback interface, unless $GLOO_SOCKET_IFNAME names another one.

    By default gloo binds to the address that the host's name resolves to.
    """
    found = [name for _, name in socket.if_nameindex() if name in _LOOPBACK_INTERFACES]
    if found:
        environ.setdefault("GLOO_SOCKET_IFNAME", found[0])


def _distributed() -> Any:
    # Late: the command line imports this file, and PyTorch takes a second.
    import torch.distributed

    return torch.distributed  # as Any: its type stubs lack some of the stores

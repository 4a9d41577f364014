"""How the processes of one machine find each other, unreachable for other machines.

PyTorch's stores listen on every address of the machine, without a password, and torchrun's
rendezvous unpickles what it finds in its store: anyone who reaches the port could run code. Only
jobs of several machines use them, see docs/guarantees.md.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import Any

from rankzero.ranks import Ranks

_LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACES = ("lo", "lo0")
_LOCAL_NAMES = ("localhost", _LOOPBACK, "::1")


def handler_of_one_agent(parameters: Any) -> Any:
    """Return a rendezvous handler for a single agent: its store is this process's memory."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    store = _distributed().HashStore()
    return create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)


def on_loopback(
    ranks: Ranks, timeout: datetime.timedelta, environ: Mapping[str, str] = os.environ
) -> Any:
    """Return the store of a job on one machine, which rank 0 serves on the loopback interface.

    Return None if the launcher's environment names another machine or a store that it serves
    itself, as torchrun does. Waits for all ranks. Raises OSError if the port is in use.
    """
    if not is_one_machine(ranks, environ):
        return None
    # PyTorch binds to all addresses. A socket that we bind to the loopback replaces its own.
    port = int(environ["MASTER_PORT"])
    listening = _listening(port, ranks.world_size).detach() if ranks.first else None
    return _distributed().TCPStore(
        _LOOPBACK,
        port,
        ranks.world_size,
        is_master=ranks.first,
        timeout=timeout,
        master_listen_fd=listening,
    )


def keep_gloo_on_loopback(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo use the loopback interface, unless $GLOO_SOCKET_IFNAME names another one.

    By default gloo binds to the address that the host's name resolves to.
    """
    found = [name for _, name in socket.if_nameindex() if name in _LOOPBACK_INTERFACES]
    if found:
        environ.setdefault("GLOO_SOCKET_IFNAME", found[0])


def is_one_machine(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether all ranks are on this machine and rank 0 must serve their store."""
    return (
        ranks.node_count == 1
        and environ.get("MASTER_ADDR") in _LOCAL_NAMES
        and environ.get("MASTER_PORT", "").isdecimal()
        and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )


def _listening(port: int, most: int) -> socket.socket:
    server = socket.socket()
    try:
        # A restarted rank 0 gets the port of the one that died, whose connections linger.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((_LOOPBACK, port))
        server.listen(most)
    except OSError:
        server.close()
        raise
    return server


def _distributed() -> Any:
    # Late: the command line imports this file, and PyTorch takes a second.
    import torch.distributed

    return torch.distributed  # as Any: its type stubs lack some of the stores

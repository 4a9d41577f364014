"""Where the processes of one machine find each other, out of other machines' reach.

PyTorch's own stores listen on every address of the machine, without a password; torchrun's rendezvous unpickles what
it finds in its own: who reaches the port could run code. Jobs of several machines need them: see docs/guarantees.md.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import Any

from rankzero.ranks import Ranks

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACES = ("lo", "lo0")
LOCAL_NAMES = ("localhost", LOOPBACK, "::1")


def handler_of_one_agent(parameters: Any) -> Any:
    """Return a rendezvous handler (of torchrun's) whose store is this process's memory: for an agent that is alone."""
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    store = _distributed().HashStore()
    return create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)


def on_loopback(
    ranks: Ranks, timeout: datetime.timedelta, environ: Mapping[str, str] = os.environ
) -> Any:
    """Return the store of a job whose ranks are all on this machine, which rank 0 serves to it alone.

    None where the launcher's environment names another machine, or serves a store itself (torchrun, of itself).
    Waits for all ranks. Raises OSError where the port was taken meanwhile.
    """
    if not is_one_machine(ranks, environ):
        return None
    port = int(environ["MASTER_PORT"])
    listening = _listening(port, ranks.world_size).detach() if ranks.first else None
    return _distributed().TCPStore(
        LOOPBACK,
        port,
        ranks.world_size,
        is_master=ranks.first,
        timeout=timeout,
        master_listen_fd=listening,
    )


def keep_gloo_on_loopback(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo's ranks talk where only this machine hears it, unless somebody has chosen: else by the host's name."""
    found = [name for _, name in socket.if_nameindex() if name in LOOPBACK_INTERFACES]
    if found:
        environ.setdefault("GLOO_SOCKET_IFNAME", found[0])


def is_one_machine(ranks: Ranks, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether all ranks are on this machine, and are to find each other by a store that rank 0 serves."""
    return (
        ranks.node_count == 1
        and environ.get("MASTER_ADDR") in LOCAL_NAMES
        and environ.get("MASTER_PORT", "").isdecimal()
        and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )


def _listening(port: int, most: int) -> socket.socket:
    server = socket.socket()
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((LOOPBACK, port))
        server.listen(most)
    except OSError:
        server.close()
        raise
    return server


def _distributed() -> Any:
    import torch.distributed  # late: the command line knows this file, and PyTorch takes a second

    return torch.distributed  # whose types do not tell of every store

"""Workers through torchrun's own elastic agent, forked from a server that has PyTorch loaded.

The server (Python's forkserver) imports PyTorch while the launcher does; workers are forks of
it and import nothing again. It never touches CUDA, so a fork of it may.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing import synchronize
from pathlib import Path
from typing import Any

from rankzero.launch import rendezvous
from rankzero.launch import signals as relay
from rankzero.launch.signals import SignalForwarder

START_METHOD = "forkserver"
# Making the first optimizer imports torch._dynamo, which takes about as long as PyTorch itself.
PRELOAD = ["torch", "torch._dynamo", "torch.utils.data", "numpy", "rankzero.training.worker"]
NOISY = (
    "torch.distributed",
    "torch.multiprocessing",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.multiprocessing.errors",
)
MONITOR_SECONDS = 0.5  # between looks at the workers: each costs them a moment of a core
LOOK_SECONDS = 0.01
SHUTDOWN_SECONDS = 30  # what a rank gets to leave once another has failed, before SIGKILL


@dataclasses.dataclass(frozen=True)
class Topology:
    """Where the processes run. The defaults are this machine alone."""

    processes: int
    """Per node."""
    nodes: int = 1
    endpoint: str = "localhost:0"
    """The rendezvous, ``host:port``; needed with several nodes."""
    job: str = "rankzero"
    """What the nodes of one job agree to call it."""
    max_restarts: int = 0


class WorkersFailed(Exception):
    """The workers failed, and no restart was left."""


def warm_up(modules: Sequence[str] = ()) -> None:
    """Start the server, which imports PyTorch and `modules` in the background. Returns at once."""
    multiprocessing.set_forkserver_preload([*PRELOAD, *modules])
    relay.start_server()


def run(
    nodes: Topology, entry: Callable[[Any], str], request: Any, logs: Path, signals: SignalForwarder
) -> str:
    """Run `entry(request)` in every process of this node; return what the first of them returned.

    SIGTERM, SIGINT, SIGHUP and SIGUSR1 to this process reach the workers, which stop at the same step; a second
    one ends them as an exception does, SIGQUIT ends them whatever they do. SIGUSR2: the run is pruned. After any of
    the first four nothing is started again.
    Raises WorkersFailed.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousError

    for name in NOISY:  # what the agent logs about a failed rank, the command says in a line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # none: signals are passed on, see below
    # A store that the agent keeps would hand a restarted rank the addresses of the dead (seen with PyTorch 2.15).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agent = LocalElasticAgent(
        _spec(nodes, entry, request),
        logs_specs=_log_specs(logs),
        start_method=START_METHOD,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    relay.start_server()
    with contextlib.closing(_Rendezvous(agent)):
        try:
            with signals.to(agent):
                result = agent.run()
        except relay.LaunchStopped as stopped:
            raise WorkersFailed(str(stopped)) from None
        except RendezvousError as error:
            raise WorkersFailed(
                f"the machines did not come together: {error or type(error).__name__}"
            ) from error
        except (
            json.JSONDecodeError
        ) as error:  # the file in which the agent looks for a failed rank's last words
            raise WorkersFailed(
                "a rank failed, and there was no room on the disk to say why"
            ) from error
    if result.is_failed():
        raise WorkersFailed(
            ", ".join(_obituary(rank, failed.exitcode) for rank, failed in result.failures.items())
        )
    return str(result.return_values[min(result.return_values)])


def _obituary(rank: int, exit_code: int) -> str:
    if exit_code >= 0:
        return f"rank {rank} ended with exit code {exit_code}"
    return f"rank {rank} was killed by {signal.Signals(-exit_code).name}"


def log_files(logs: Path, local_rank: int) -> list[Path]:
    """Return the files that a local rank's output goes to, of all attempts, oldest first."""
    found = logs.glob(f"*/attempt_*/{local_rank}/std*.log")
    return sorted(
        found, key=lambda path: (path.parent.stat().st_mtime_ns, path.name != "stdout.log")
    )


def _spec(nodes: Topology, entry: Callable[[Any], str], request: Any) -> Any:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=nodes.endpoint,
        run_id=nodes.job,
        min_nodes=nodes.nodes,
        max_nodes=nodes.nodes,
        local_addr="localhost" if nodes.nodes == 1 else None,
    )
    make = rendezvous.handler_of_one_agent if nodes.nodes == 1 else registry.get_rendezvous_handler
    return WorkerSpec(
        role="rank",
        local_world_size=nodes.processes,
        entrypoint=enter,
        args=(entry, request),
        rdzv_handler=make(parameters),
        max_restarts=nodes.max_restarts,
        monitor_interval=MONITOR_SECONDS,
        local_addr="localhost" if nodes.nodes == 1 else None,
    )


def enter(entry: Callable[[Any], str], request: Any) -> str:
    """Run `entry(request)` in a worker, and see to it that the agent outlives the worker's death afterwards.

    A worker that has returned waits for the agent's event, which lets all of them go; to set it, the agent waits for
    each that sleeps on it to wake, for ever where one was killed meanwhile (seen with PyTorch 2.15). Who looks does
    not sleep.
    """
    relay.release_for(entry)
    result = entry(request)
    synchronize.Event.wait = wait_by_looking  # type: ignore[assignment, method-assign]
    return result


def wait_by_looking(event: Any, timeout: float | None = None) -> bool:
    """Wait for an event of multiprocessing's without a trace in it: no lock, no place among the sleepers."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while event._flag._semlock._is_zero():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def _log_specs(logs: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    logs.mkdir(parents=True, exist_ok=True)
    return DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL)


class _Rendezvous:
    """Ends the agent's rendezvous, whatever happened."""

    def __init__(self, agent: Any) -> None:
        self._handler = agent.get_worker_group().spec.rdzv_handler

    def close(self) -> None:
        self._handler.shutdown()

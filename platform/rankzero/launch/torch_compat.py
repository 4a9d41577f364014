"""Everything that depends on private names of PyTorch's elastic agent and of multiprocessing.

Seen with PyTorch 2.15 and Python 3.11. ``tests/launch/test_torch_compat.py`` fails
when one of these names goes or changes its meaning:

    ObservedAgent           LocalElasticAgent._start_workers, _stop_workers, _monitor_workers,
                            _remaining_restarts, _pcontext; its _ret_vals and _pc
    poll_after_return       multiprocessing.synchronize.Event.wait, Event._flag._semlock._is_zero
    is_spare                DynamicRendezvousHandler._this_node, _state_holder.state.redundancy_list
    configure_environment   TORCHELASTIC_SIGNALS_TO_HANDLE, TORCH_DISABLE_SHARE_RDZV_TCP_STORE

Imports PyTorch, which takes a second: import it inside functions.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, MutableMapping
from multiprocessing import connection, synchronize
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from rankzero.launch import stopped_workers
from rankzero.launch.signals import Workers

POLL_SECONDS = 0.01


class ObservedAgent(LocalElasticAgent):
    """torchrun's agent, which reports when its workers start and stop.

    The agent's own signal handling kills running workers 30 s after a signal, ignores SIGUSR1 and
    has no process ids to signal while workers start (pytorch/pytorch#68258, #119856, #154849).
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        observer: Workers,
        joined: Callable[[int], object] = lambda _: None,
        monitor_seconds: float = 0.5,
    ) -> None:
        self._observer, self._joined = observer, joined
        # Each look at the workers takes a core from them for a moment.
        self._monitor_seconds = monitor_seconds
        self.have_met = False
        """Whether the machines have found each other."""
        super().__init__(
            spec,
            logs_specs,
            start_method="forkserver",
            # It waits so long at the end for the agents of other machines, which may be gone.
            exit_barrier_timeout=60,
        )

    @property
    def _remaining_restarts(self) -> int:
        # The agent asks for this when a worker has failed. It must not restart workers that failed
        # because a signal ended them.
        return 0 if self._observer.is_stopped else self._restarts

    @_remaining_restarts.setter
    def _remaining_restarts(self, restarts: int) -> None:
        self._restarts = restarts

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.have_met = True
        self._observer.starting()
        self._joined(worker_group.group_rank or 0)
        ids: dict[int, Any] = super()._start_workers(worker_group)
        self._observer.started(list(ids.values()))
        stopped_workers.watch(list(ids.values()))
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._observer.kill_late()
        # The agent alone would look every so often. This one looks once a worker returns or ends.
        workers: Any = self._pcontext
        returned = [queue._reader for queue in workers._ret_vals.values()]
        connection.wait([*returned, *workers._pc.sentinels], self._monitor_seconds)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._observer.stopping()
        super()._stop_workers(worker_group)


def is_spare(handler: Any) -> bool:
    """Return whether torchrun's rendezvous keeps this machine out: there are enough of them."""
    return handler is not None and handler._this_node in handler._state_holder.state.redundancy_list


def silence_loggers() -> None:
    """Keep PyTorch's pages about a failed rank out of the output. The command prints one line."""
    names = ("torch.distributed", "torch.multiprocessing")
    # Some of its loggers have a level of their own.
    for name in (*names, *logging.root.manager.loggerDict):
        if name.startswith(names):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def configure_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that the agent reads in this process, for the rest of its life."""
    # None: `launch.signals` handles signals. The agent's handlers would replace its handlers.
    environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    # A store that the agent keeps over restarts gives a restarted rank the addresses of dead ones
    # (pytorch/pytorch#135712).
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def poll_after_return() -> None:
    """Let this worker poll for the agent's event, which it waits for after its function returned.

    The agent sets the event when all workers have returned. `Event.set` waits until each sleeping
    waiter has woken up, and blocks forever if one was killed (python/cpython#75158). A worker
    that polls is not a sleeping waiter.
    """
    synchronize.Event.wait = wait_by_polling  # type: ignore[assignment, method-assign]


def wait_by_polling(event: Any, timeout: float | None = None) -> bool:
    """Wait for a `multiprocessing.Event` without taking its lock; return whether it is set."""
    deadline = None if timeout is None else time.monotonic() + timeout
    # `Event.is_set` takes a lock, which nobody releases if its holder is killed.
    while event._flag._semlock._is_zero():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True

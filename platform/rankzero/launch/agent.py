"""Starts workers with torchrun's elastic agent, as forks of a server that has PyTorch loaded.

Workers import nothing again. The server never touches CUDA, so it may be forked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankzero import ranks
from rankzero.launch import fork_server, output, rendezvous, signals
from rankzero.launch.machines import ALONE, DEFAULT_JOIN_SECONDS, Machines
from rankzero.launch.parent_death import end_with_parent
from rankzero.launch.process_name import set_process_name
from rankzero.launch.signals import SignalForwarder

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.rendezvous import RendezvousError

    from rankzero.run_store.folder import RunFolder

# The command needs these, too.
_SHARED = ("torch", "numpy", "rankzero.launch.torch_compat", "rankzero.training.worker")
# The first optimizer imports it, which takes about as long as PyTorch itself. It is a private name:
# if it goes, the server ignores it, and runs start a second later.
_PRELOAD = ("torch._dynamo",)
# PyTorch's C++ code reads it once, when it is imported. It logs pages about each lost connection.
_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclasses.dataclass(frozen=True)
class Topology:
    """The processes of each machine, and the machines: by default this one alone."""

    processes: int
    max_restarts: int = 0
    machines: Machines = ALONE
    silence_seconds: float | None = None
    """The command ends after a link between machines is cut for so long. None: no limit."""


@dataclasses.dataclass(frozen=True)
class LaunchResult:
    """How the workers of this machine ended."""

    status: str
    """The first worker's result, or FAILED."""
    reason: str = ""
    """Why the workers failed, in a line for people; empty unless FAILED."""
    killed_by: signal.Signals | None = None
    """The signal that killed a worker, if one was killed."""


def warm_up(libraries: Sequence[str] = (), more: Sequence[str] = (), *, alone: bool = True) -> None:
    """Import PyTorch and `libraries`; start the server, which imports `more` in the background.

    `alone`: whether the command launches on this machine only. Call it before all that may compute
    or start a thread.
    """
    if alone:
        fork_server.start((*_SHARED, *libraries), (*_PRELOAD, *more))
        return
    fork_server.start((), (*_SHARED, *libraries, *_PRELOAD, *more))
    # Only for this process. The server has its environment already: ranks log as they would.
    os.environ.setdefault(_CPP_LOG_LEVEL, "FATAL")


def run(
    topology: Topology,
    entry: Callable[[Any], str],
    request: Any,
    logs: Path,
    forwarder: SignalForwarder,
    joined: Callable[[int], object] = lambda _: None,
    *,
    folder: RunFolder | None = None,
    notice: Callable[[str], object] = lambda _: None,
) -> LaunchResult:
    """Run `entry(request)` in every process of this machine; return how they ended.

    `joined` gets this machine's number before each start of its workers. The first machine is the
    one that has the run, in `folder`. `notice` gets a line if this machine is one too many.

    SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 to this process stop the workers for good, at the
    same step. A second one ends them as an exception does (`SignalForwarder`). SIGQUIT kills them.
    """
    # Late: they import PyTorch.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousError

    from rankzero.launch import torch_compat

    torch_compat.silence_loggers()
    torch_compat.configure_environment()
    logs.mkdir(parents=True, exist_ok=True)
    logs_specs = DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL)
    fork_server.ensure_running()
    alone, agent = topology.machines.alone, None
    store = rendezvous.private_folder() if alone else contextlib.nullcontext()
    try:
        with store as private, forwarder.to_workers() as workers:
            handler = _handler(topology, folder, notice)
            spec = _worker_spec(topology, entry, request, handler, private)
            try:
                agent = torch_compat.ObservedAgent(spec, logs_specs, workers, joined)
                result = agent.run()
            finally:
                spec.rdzv_handler.shutdown()
    except signals.LaunchStopped as stopped:
        return LaunchResult("FAILED", str(stopped))
    except RendezvousError as error:
        what = "lost" if agent and agent.have_met else "did not find"
        why = _why(error, topology.machines, have_met=what == "lost")
        return LaunchResult("FAILED", f"the machines {what} each other: {why}")
    except json.JSONDecodeError:
        return LaunchResult("FAILED", "a rank failed, and the disk was too full to write why")
    return _result_of(result, topology.machines)


def _why(error: RendezvousError, machines: Machines, *, have_met: bool) -> str:
    """Return what torchrun's errors mean. Some have no text, or name another error."""
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    place, mend = machines.endpoint, "start the same command on each machine"
    if isinstance(error, RendezvousTimeoutError):
        limit = machines.settings.get("join_timeout", DEFAULT_JOIN_SECONDS)
        few = f"fewer than {machines.least} came to {place} in {limit} s"
        return f"{few}: {mend}, or give them longer by --rdzv-conf join_timeout=SECONDS"
    if "inner exception" not in str(error):
        return str(error) or type(error).__name__
    # Some have no text, as a TimeoutError.
    cause = str(error.__cause__).partition("\n")[0] or type(error.__cause__).__name__
    none = f"no rendezvous answers at {place} ({cause})"
    if have_met:
        return f"{none}: continue the run by `rankzero resume` on each machine"
    return f"{none}: {mend}. The port must be open to all, and used by no other program"


def _result_of(result: RunResult | None, machines: Machines) -> LaunchResult:
    """Return what the agent reports as a value that outlives it."""
    if result is None:
        others = f"{machines.most} other machines trained {machines.job} at {machines.endpoint}"
        mend = "another training needs its own --rdzv-id and port"
        return LaunchResult("FAILED", f"{others}, and did not need this one: {mend}")
    if not result.is_failed():
        return LaunchResult(str(result.return_values[min(result.return_values)]))
    codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    signals_of = {rank: signal.Signals(-code) for rank, code in codes.items() if code < 0}
    reasons = [
        f"rank {rank} was killed by {signals_of[rank].name}"
        if rank in signals_of
        else f"rank {rank} ended with exit code {code}"
        for rank, code in codes.items()
    ]
    return LaunchResult("FAILED", ", ".join(reasons), next(iter(signals_of.values()), None))


def _handler(topology: Topology, folder: RunFolder | None, notice: Callable[[str], object]) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from rankzero.launch import meeting

    machines = topology.machines
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=machines.endpoint,
        run_id=machines.job,
        min_nodes=machines.least,
        max_nodes=machines.most,
        local_addr=machines.address,
        **machines.settings,
    )
    if machines.alone:
        return rendezvous.handler_of_one_agent(parameters)
    if machines.number != 0 and not machines.is_served():
        notice(f"nothing answers at {machines.endpoint} yet: waiting for the first machine")
    handler = meeting.handler_of(parameters, machines, folder, notice)
    rendezvous.limit_silence(machines.endpoint, topology.silence_seconds)
    return handler


def _worker_spec(
    topology: Topology, entry: Callable[[Any], str], request: Any, handler: Any, store: str | None
) -> Any:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    machines = topology.machines
    interface = None if machines.alone else machines.interface
    return WorkerSpec(
        role="rank",
        local_world_size=topology.processes,
        entrypoint=enter,
        args=(entry, request, store, interface),
        rdzv_handler=handler,
        max_restarts=topology.max_restarts,
        monitor_interval=1e-3,  # `ObservedAgent` waits by itself
        local_addr=machines.address,
    )


def enter(
    entry: Callable[[Any], str], request: Any, store: str | None = None, network: str | None = None
) -> str:
    """Run `entry(request)` in a worker. The agent calls this.

    `store`: the folder through which the ranks of one machine find each other. `network`: the
    network interface by which those of several machines do.
    """
    from rankzero.launch import torch_compat

    # As under torchrun. Linux may share the machine among sessions (autogroup). Two ranks on two
    # cores took 465 steps a second in one session, and 506 in two.
    with contextlib.suppress(PermissionError):
        os.setsid()
    set_process_name(f"rank-{ranks.detect().rank}")
    end_with_parent()  # the server: nobody else could restart this worker or knows it
    rendezvous.use_folder(store)
    if network is not None:
        # By default gloo binds to the address that the host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", network)
    # A fork of the server would start processes through that server, which must pickle all that
    # they need. The user's code gets Python's default, as in a process of its own.
    multiprocessing.set_start_method(None, force=True)
    if not signals.unblocks(entry):
        signals.unblock()
    # The log is in the run's folder. A print of the user's code must not end a training.
    with output.drops_what_does_not_fit():
        result = entry(request)
    torch_compat.poll_after_return()
    return result


def log_files(logs: Path, local_rank: int) -> list[Path]:
    """Return the output files of a local rank, of all attempts, oldest first."""
    return sorted(
        logs.glob(f"*/attempt_*/{local_rank}/std*.log"),
        key=lambda path: (path.parent.stat().st_mtime_ns, path.name != "stdout.log"),
    )

"""The process that launches trials, one after the other. It has PyTorch; the search has not.

    search ── pipe ──▶ host ── torchrun's agent ──▶ ranks, forked for each trial from a warm server

The search sends requests through the pipe, and controls the running trial by signals: SIGUSR2
prunes, SIGTERM stops, SIGQUIT kills. A trial that ends, in whatever way, is to the search a
message, or a host process that ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rankzero.launch import agent, output
from rankzero.launch.signals import SignalForwarder, handled_signals
from rankzero.tuning.trials.describe import ExperimentDescription, Question, describe
from rankzero.tuning.trials.resources import VISIBLE, Share

_ORPHAN_SECONDS = 20.0  # for the ranks to stop by themselves once the search has died
# The server that ranks are forked from imports these once, so that no rank does.
_PRELOAD = ("rankzero.tuning.probe.worker", "rankzero.tuning.trials.launcher")


class LocalHost:
    """The search's end: a host process on a share of the machine, started again if it died."""

    def __init__(
        self, libraries: Sequence[str], share: Share | None = None, *, alone: bool = True
    ) -> None:
        """`alone`: whether this machine has all ranks of each trial."""
        self._libraries, self._share, self._alone = tuple(libraries), share or Share(), alone
        self.was_lost = False
        # The first request waits in the pipe until the process has imported what it needs.
        self.is_starting = False
        self._start()

    def describe(self, asked: Question) -> ExperimentDescription:
        """Return the description of the experiment in a file. Raises UserError, RunFailed."""
        try:
            self._pipe.send((describe, asked))
            answer = self._pipe.recv()
        # One that dies before it has read its request resets the pipe.
        except (EOFError, OSError):
            code = self._process.exitcode
            raise RuntimeError(f"the process that launches trials ended with {code}") from None
        if isinstance(answer, ExperimentDescription):
            return answer
        raise answer

    def run(
        self,
        entry: Callable[[Any], str],
        topology: agent.Topology,
        request: Any,
        logs: Path,
        folder: Path,
        prefix: str = "",
    ) -> None:
        """Have every rank run `entry(request)`; return at once. See `has_ended`.

        `entry`: a function at the top of a module that imports no PyTorch. `folder`: all that the
        ranks read and write; `logs` is in it. `prefix`: of the names of what they read there.
        """
        del folder, prefix  # The ranks use the same disk.
        if not self._process.is_alive():
            self._start()
        self.was_lost, self._launches = False, True
        # A host that has died meanwhile reads nothing. `has_ended` reports the loss.
        with contextlib.suppress(OSError):
            self._pipe.send((_launch, entry, topology, request, logs))

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Return whether the trial has ended, after at most `seconds`. True once for each trial."""
        # A host that died ends the trial, too: its ranks end with it.
        try:
            if not self._pipe.poll(seconds):
                self.was_lost = not self._process.is_alive()
                return self.was_lost
            self._pipe.recv()
        except (EOFError, OSError):  # also of a pipe that `close` has closed
            self.was_lost = True
        return True

    @property
    def handles(self) -> list[Connection | int]:
        """Return what `multiprocessing.connection.wait` waits on for the trial's end."""
        # Nobody can wait on a pipe that `close` has closed, as when a frozen host is given up.
        return [] if self._pipe.closed else [self._pipe, self._process.sentinel]

    def signal(self, number: signal.Signals, written: Sequence[Path] = ()) -> None:
        """Send a signal to the trial that runs."""
        del written  # The ranks read these files from the same disk.
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def close(self) -> None:
        """End the host, and the trial that it runs."""
        self._pipe.close()
        # A probe's ranks ignore SIGTERM. Without a host, nobody would end them. One that launched
        # nothing may still be starting, and would leave a core file.
        if self._launches:
            self.signal(signal.SIGQUIT)
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        # Not a fork: the search may have threads, and the host must import PyTorch by itself.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, self._libraries, self._share, self._alone)
        self._process = context.Process(target=_main, args=given, name="rankzero-host")
        self._process.start()
        self._launches = False
        # Else the pipe would stay open when the host dies, and `recv` would wait without end.
        theirs.close()


def _main(pipe: Connection, libraries: Sequence[str], share: Share, alone: bool) -> None:
    """Serve requests until the pipe is closed, on a share of the machine."""
    if share.gpus is not None:
        os.environ[VISIBLE] = ",".join(share.gpus)
    if share.cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share.cores)
    # Between trials there is nothing to stop. A trial's launch sets handlers of its own.
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    # A launch handles no SIGHUP or SIGINT that is ignored here, so these get an empty handler.
    for number in handled_signals([signal.SIGHUP, signal.SIGINT]):
        signal.signal(number, lambda _number, _frame: None)
    agent.warm_up(libraries, _PRELOAD, alone=alone)
    working = threading.Lock()
    threading.Thread(target=_follow_the_search, args=(working,), daemon=True).start()
    # Imported now, while nobody waits, and not in the first trial.
    import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401, TID251

    with contextlib.suppress(EOFError, ConnectionError):  # the search has ended or was killed
        while True:
            serve, *given = pipe.recv()
            with working:
                pipe.send(serve(*given))


def _launch(entry: Callable[[Any], str], topology: agent.Topology, request: Any, logs: Path) -> str:
    logs.mkdir(parents=True, exist_ok=True)
    how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    descriptor = os.open(logs / "launcher.log", how, 0o644)
    # Also the output of the processes that this one starts.
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    output.escape_unencodable()
    try:
        # Ctrl-C reaches this process twice, from the terminal and from the search. That is one
        # request. To end a trial at once, the search sends SIGQUIT.
        with SignalForwarder(of_trial=True) as signals:
            result = agent.run(topology, entry, request, logs, signals)
    except Exception as error:
        # The run's journal has the reason. The message of torchrun goes into its log.
        print(error, flush=True)
        return "FAILED"
    if result.reason:
        print(result.reason, flush=True)
    return result.status


def _follow_the_search(working: threading.Lock) -> None:
    """Stop the trial when the search dies: nobody reads its journal, and it holds the GPUs."""
    if (parent := multiprocessing.parent_process()) is not None:
        wait([parent.sentinel])
    # Nothing is launched and nothing can be any more. On a busy machine, PyTorch's import would
    # keep this process for half a minute.
    if working.acquire(blocking=False):
        os._exit(1)
    # First a stop at the end of a step, then the end of all ranks.
    for number in (signal.SIGTERM, signal.SIGQUIT):
        os.kill(os.getpid(), number)
        time.sleep(_ORPHAN_SECONDS)
    os._exit(1)

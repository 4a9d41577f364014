"""The process that launches trials, one after the other: `rankzero train` that stays. Has PyTorch; the search has not.

    search ── pipe ──▶ host ── torchrun's agent ──▶ ranks, forked anew for each trial from the host's warm server

The search sends what to do through the pipe and steers the trial that runs with signals: SIGUSR2 prunes, SIGTERM stops,
SIGQUIT kills. Whatever becomes of a trial, to the search it is a message, or a process that ended.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from rankzero.config import ConfigError
from rankzero.errors import UserError
from rankzero.launch import agent, output
from rankzero.launch.signals import SignalForwarder, handled_signals
from rankzero.tuning.trials import describe as mirror
from rankzero.tuning.trials.resources import EVERYTHING, VISIBLE, Share

ORPHAN_SECONDS = 20.0  # what the ranks get to stop by themselves once the search is gone
STEERING = (signal.SIGUSR2, signal.SIGTERM, signal.SIGQUIT)


class Host:
    """The search's end: a host process on a share of the machine, started again where it died."""

    def __init__(self, libraries: Sequence[str], share: Share = EVERYTHING) -> None:
        self._libraries, self._share = libraries, share
        self._start()

    def describe(
        self, reference: str, settings: dict[str, str], processes: int | None, parallel: int = 1
    ) -> mirror.ExperimentDescription:
        """Return what the experiment in a file is. Raises UserError, ConfigError, RunFailed."""
        self._pipe.send(("describe", reference, settings, processes, parallel))
        answer = self._answer()
        if isinstance(answer, mirror.ExperimentDescription):
            return answer
        raise answer

    def run(self, entry: str, nodes: agent.Topology, request: Any, logs: Path) -> None:
        """Have `entry`, ``module:function``, run in every rank; `over` tells when they have ended."""
        if not self._process.is_alive():
            self._start()
        self._pipe.send(("run", entry, nodes, request, str(logs)))

    def over(self, seconds: float = 0.0) -> bool:
        """Tell whether the trial has ended, waiting up to some seconds for it; true once for each trial."""
        if not self._pipe.poll(seconds):
            return not self._process.is_alive()
        with contextlib.suppress(EOFError):
            self._pipe.recv()
        return True

    def signal(self, number: signal.Signals) -> None:
        """Steer the trial that runs."""
        pid = self._process.pid
        if pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End the host, and with it whatever it runs."""
        self._pipe.close()
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=main, args=(theirs, tuple(self._libraries), self._share), name="rankzero-host"
        )
        self._process.start()
        theirs.close()

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(
                f"the process that launches trials ended with {self._process.exitcode}"
            ) from None


def main(pipe: Connection, libraries: Sequence[str], share: Share) -> None:
    """Do what comes through the pipe until it is closed, on a share of the machine."""
    _keep_to(share)
    for number in STEERING:  # between trials there is nothing to steer
        signal.signal(number, signal.SIG_IGN)
    # A handler that does nothing: a trial's launch handles no signal that is ignored here.
    for number in handled_signals([signal.SIGHUP, signal.SIGINT]):
        signal.signal(number, _do_nothing)
    agent.warm_up([*libraries, "rankzero.tuning.probe.worker"])
    threading.Thread(target=_follow_the_search, daemon=True).start()
    import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401, TID251 - now, not in the first trial

    with contextlib.suppress(EOFError, ConnectionError):  # the search has gone, or was killed
        while True:
            kind, *words = pipe.recv()
            pipe.send(_described(*words) if kind == "describe" else _ran(*words))


def _do_nothing(_signal: int, _frame: FrameType | None) -> None:
    pass


def _keep_to(share: Share) -> None:
    """Use nothing else, in this process and all it starts."""
    if share.gpus is not None:
        os.environ[VISIBLE] = ",".join(share.gpus)
    if share.cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share.cores)


def _described(
    reference: str, settings: dict[str, str], processes: int | None, parallel: int
) -> Any:
    try:
        return mirror.describe(reference, settings, processes, parallel)
    except (UserError, ConfigError, Exception) as error:
        return error


def _ran(entry: str, nodes: agent.Topology, request: Any, logs: str) -> str:
    module, _, function = entry.partition(":")
    with _output_to(Path(logs) / "launcher.log"):
        output.escape_unencodable()
        try:
            # Ctrl-C in a terminal comes from it and from the search: one wish. To end a trial the search says SIGQUIT.
            with SignalForwarder(second_ends=False) as signals:
                begin = getattr(importlib.import_module(module), function)
                result = agent.run(nodes, begin, request, Path(logs), signals)
        except (
            Exception
        ) as error:  # the run's journal has the reason; what torchrun says of it is a detail
            print(error, flush=True)
            return "FAILED"
        if result.reason:
            print(result.reason, flush=True)
        return result.status


@contextlib.contextmanager
def _output_to(path: Path) -> Any:
    """Send this process's output to a file for the duration of the block, that of its children included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = [os.dup(stream) for stream in (1, 2)]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    try:
        yield
    finally:
        for stream, old in zip((1, 2), before, strict=True):
            os.dup2(old, stream)
            os.close(old)


def _follow_the_search() -> None:
    """Stop the trial when the search dies: nobody would read it, and it holds the GPUs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    for number in (signal.SIGTERM, signal.SIGQUIT):
        os.kill(os.getpid(), number)
        time.sleep(ORPHAN_SECONDS)
    os._exit(1)

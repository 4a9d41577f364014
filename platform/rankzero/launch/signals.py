"""Signals on their way from the launcher to the workers: none is lost, whenever it comes.

    no workers yet       (rendezvous, between two attempts)  the launch ends: there is nothing to save
    being started        they get it once they exist; forked with signals held, they hear it once they listen
    running              passed on, the first as a wish to stop, a second one as an end
    ended                remembered: who delivers looks at `received`

The agent's own way would lose those that come before workers have ids, give running ones 30 seconds and then SIGKILL,
and start again, as after a failure, those that were told to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from types import FrameType
from typing import Any, Self, TypeVar

PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
}
TRANSLATED = {signal.SIGUSR2: signal.SIGUSR2, signal.SIGQUIT: signal.SIGKILL}
HELD = frozenset({*PASSED_ON, *TRANSLATED})
LISTENS = "listens_to_signals"
Entry = TypeVar("Entry", bound=Callable[..., Any])


def heard(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return those to listen to: not SIGHUP where the command was begun with that ignored, as ``nohup`` begins it."""
    return [
        one
        for one in numbers
        if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN
    ]


class LaunchStopped(Exception):
    """A signal asked the launcher to stop where no worker could hear it."""


class SignalForwarder:
    """What signals ask of this process inside its ``with`` block, and of the workers that it has. Main thread only."""

    def __init__(self, *, second_ends: bool = True) -> None:
        """`second_ends`: a second signal ends the workers at once; where not, whoever steers says SIGQUIT for that."""
        self._second_ends = second_ends
        self.received: list[signal.Signals] = []
        """Those that ask to stop."""
        self._workers: _Workers | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._hear) for number in heard(HELD)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def to(self, agent: Any) -> Iterator[None]:
        """Pass on what comes during the block to the agent's workers. Raises Stopped where there are none."""
        self._workers = _Workers(agent)
        try:
            if self.received:
                raise LaunchStopped(f"stopped by {self.received[0].name} before it began")
            yield
        finally:
            self._workers = None

    def _hear(self, received: int, _frame: FrameType | None) -> None:
        number = signal.Signals(received)
        if number in PASSED_ON:
            self.received.append(number)
        if self._workers is None:
            return
        if number in TRANSLATED:
            self._workers.send(TRANSLATED[number])
        else:
            again = self._second_ends and len(self.received) > 1
            self._workers.stop(number, signal.SIGQUIT if again else PASSED_ON[number])


class _Workers:
    """An agent's worker processes, as far as signals go."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._pids: list[int] | None = None
        """Of those that run; none: there are none, or they are being started."""
        self._starting = False
        self._stopped: signal.Signals | None = None
        """By what, if anything: the agent itself counts no restart that another machine's failure asks for."""
        self._waiting: list[signal.Signals] = []
        self._start, self._end = agent._start_workers, agent._stop_workers
        agent._start_workers, agent._stop_workers = self._started, self._ended

    def stop(self, received: signal.Signals, number: signal.Signals) -> None:
        """Send `number`, after which nothing is started again. Raises Stopped where nobody could hear it."""
        self._agent._remaining_restarts, self._stopped = 0, received
        if self._pids is None and not self._starting:
            raise LaunchStopped(f"stopped by {received.name} before it began")
        self.send(number)

    def send(self, number: signal.Signals) -> None:
        """Send `number` to each worker, now or once there are some."""
        if self._pids is None:
            self._waiting.append(number)
            return
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _started(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        if self._stopped is not None:
            raise LaunchStopped(f"stopped by {self._stopped.name}, and not begun again")
        self._starting = True
        ids: dict[int, Any] = self._start(*args, **kwargs)
        self._pids, self._starting = list(ids.values()), False
        while self._waiting:
            self.send(self._waiting.pop(0))
        return ids

    def _ended(self, *args: Any, **kwargs: Any) -> None:
        self._pids = None
        self._end(*args, **kwargs)


def start_server() -> None:
    """Start the server that workers are forked from, with signals held in it and in all that it forks.

    So a scheduler that signals every process of a job does not end it, nor a worker that does not listen yet.
    """
    resource_tracker.ensure_running()  # it lets go of signals that are held while it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release() -> None:
    """Let this process, forked from the server, have its signals, those that waited first."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def listens(entry: Entry) -> Entry:
    """Mark a worker's entry point as one that calls `release` itself, once it listens to signals."""
    setattr(entry, LISTENS, True)
    return entry


def release_for(entry: Callable[..., Any]) -> None:
    """Let a worker have its signals, unless its entry point does so itself."""
    if not getattr(entry, LISTENS, False):
        release()

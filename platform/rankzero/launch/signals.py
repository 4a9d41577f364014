"""Forwards signals from the launcher to the workers, also while workers are starting.

    workers                               a signal
    none (rendezvous, between starts)     ends the launch; there is nothing to save
    starting                              waits until they exist and have signal handlers
    running                               is forwarded: the first asks to stop, a second one ends
    running 10 s after a second one       are killed: they may hang in C, where no handler runs
    ended                                 is kept in `received`, for the wait for the delivery

Signal handlers of the package: `SignalForwarder` (launcher, trial host, a wait for MLflow),
`training.stop.handle_signals` (workers), `cli.main.command` (ignores signals on the way out;
as a container's first process, SIGTERM ends it), `cli.commands.ui` (ends the server),
`cli.commands.search` (SIGTERM acts as Ctrl-C, also for `probe`, `compare` and `profile`),
`tuning.places.node` (ends a host on another machine), `api.commands` (forwards SIGTERM and SIGHUP
from the user's program to the command).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Self, TypeVar

_FORWARDED = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
}
"""Signals that ask to stop, and what the workers get."""
_REPEATED = frozenset({signal.SIGTERM, signal.SIGHUP})
"""A service manager sends both, and to every process; a program that gets them forwards them."""
_REPEATED_SECONDS = 2.0
_END_SECONDS = 10.0
_BLOCKED = frozenset({*_FORWARDED, signal.SIGQUIT})
"""Signals that wait until a new worker has handlers."""
_UNBLOCKS = "unblocks_signals"
Entry = TypeVar("Entry", bound=Callable[..., Any])


class LaunchStopped(Exception):
    """A signal asked the launcher to stop when it had no workers to forward it to."""


def handled_signals(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals to handle: all but SIGHUP and SIGINT where those were ignored at start.

    ``nohup`` starts commands with SIGHUP ignored, a script its background jobs with SIGINT ignored.
    """
    return [
        number
        for number in numbers
        if number not in (signal.SIGHUP, signal.SIGINT)
        or signal.getsignal(number) is not signal.SIG_IGN
    ]


class SignalForwarder:
    """Handles signals inside its ``with`` block and forwards them to the workers.

    Main thread only.
    """

    def __init__(
        self, *, of_trial: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`of_trial`: a search sends the signals. SIGUSR2 prunes, and only SIGQUIT ends at once.

        Otherwise SIGUSR2 asks to stop, and a second signal ends the workers at once. SIGTERM and
        SIGHUP soon after one of them are the same request.
        """
        self._of_trial = of_trial
        self.received: list[signal.Signals] = []
        """Signals that asked to stop."""
        self._clock, self._repeats_until = clock, 0.0
        self._workers: Workers | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        numbers = handled_signals(_BLOCKED)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def to_workers(self) -> Iterator[Workers]:
        """Forward signals to one launch's workers; yield the observer that its agent needs.

        Raises LaunchStopped when a signal asks to stop and no worker can get it.
        """
        self._workers = Workers(self._clock)
        try:
            if self.received:
                raise LaunchStopped(f"stopped by {self.received[0].name} before it began")
            yield self._workers
        finally:
            self._workers = None

    def _handle(self, received: int, _frame: FrameType | None) -> None:
        number = signal.Signals(received)
        if number in _REPEATED:
            if self._clock() < self._repeats_until:
                return
            self._repeats_until = self._clock() + _REPEATED_SECONDS
        steers = number == signal.SIGQUIT or (self._of_trial and number == signal.SIGUSR2)
        if not steers:
            self.received.append(number)
        if self._workers is None:
            return
        if number == signal.SIGQUIT:
            self._workers.kill()
        elif steers:
            self._workers.send(number)
        else:
            ends = not self._of_trial and len(self.received) > 1
            self._workers.stop(number, signal.SIGQUIT if ends else _FORWARDED[number])


class Workers:
    """The worker processes of one launch. A `torch_compat.ObservedAgent` reports to it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._kill_at = clock, math.inf
        self._pids: list[int] | None = None
        """The running workers'; None: there are none, or they are starting."""
        self._starting = False
        self._stopped_by: signal.Signals | None = None
        self._pending: list[signal.Signals] = []

    @property
    def is_stopped(self) -> bool:
        """Return whether workers must not be started again."""
        return self._stopped_by is not None

    def stop(self, received: signal.Signals, number: signal.Signals) -> None:
        """Send `number`. Raises LaunchStopped, out of the agent, where there are no workers."""
        self._stopped_by = received
        self._require_some(received)
        if number == signal.SIGQUIT:
            self._kill_at = min(self._kill_at, self._clock() + _END_SECONDS)
        self.send(number)

    def kill_late(self) -> None:
        """Kill the running workers if a second signal should have ended them by now."""
        if self._clock() >= self._kill_at:
            self.send(signal.SIGKILL)

    def kill(self) -> None:
        """Kill each worker. Raises LaunchStopped where there are none: other machines are late."""
        self._require_some(signal.SIGQUIT)
        self.send(signal.SIGKILL)

    def _require_some(self, received: signal.Signals) -> None:
        if self._pids is None and not self._starting:
            raise LaunchStopped(f"stopped by {received.name} before it began")

    def send(self, number: signal.Signals) -> None:
        """Send `number` to each worker, now or once they have started."""
        if self._pids is None:
            self._pending.append(number)
            return
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def starting(self) -> None:
        """Take note that workers are about to start. Raises LaunchStopped after a signal."""
        # The agent does not count a restart that another machine's failure asks for.
        if self._stopped_by is not None:
            raise LaunchStopped(f"stopped by {self._stopped_by.name}, and not started again")
        self._starting = True

    def started(self, pids: list[int]) -> None:
        """Take note that workers run; send them the signals that waited."""
        self._pids, self._starting = pids, False
        while self._pending:
            self.send(self._pending.pop(0))

    def stopping(self) -> None:
        """Take note that workers are about to be stopped."""
        self._pids = None


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block signals in this thread, and for good in the processes that it starts inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock() -> None:
    """Unblock signals in a process forked from the server; those that waited arrive first."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)


def unblocks_itself(entry: Entry) -> Entry:
    """Mark a worker's entry point as one that calls `unblock` itself, once it has handlers."""
    setattr(entry, _UNBLOCKS, True)
    return entry


def unblocks(entry: Callable[..., Any]) -> bool:
    """Return whether the entry point is marked with `unblocks_itself`."""
    return getattr(entry, _UNBLOCKS, False)

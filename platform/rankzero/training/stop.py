"""Requests to stop a training early, and how the ranks agree on one at the same step.

A signal, the time limit or a dead launcher sets this rank's `StopRequest`. The ranks exchange their
codes with each report of the loop. During an evaluation they do so through `StopPoll`.
"""

from __future__ import annotations

import enum
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Self

import torch

from rankzero.launch import signals
from rankzero.training.distributed.world import World

_REPORT_SECONDS = 1.0
# A bound in steps too: it limits what a SIGKILL can take, and the host's list of tensors.
LONGEST_WINDOW = 1000
# Batches may get slower, so an interval measured on fast ones must not grow without bound.
MOST_BATCHES = 32
# Seconds that a rank whose launcher died may take to stop with a checkpoint.
_ORPHAN_SECONDS = 120.0


class StopCode(enum.IntEnum):
    """Why a training stops early. The ranks exchange the number, people read the reason."""

    reason: str

    NONE = 0, ""
    SIGTERM = 1, "stopped by SIGTERM"
    CTRL_C = 2, "stopped by Ctrl-C"
    TIME_LIMIT = 3, "reached train.limits.max_minutes"
    PRUNED = 4, "pruned"
    SIGUSR1 = 5, "stopped by SIGUSR1"
    LAUNCHER_DIED = 6, "stopped because the launching process died"
    SIGUSR2 = 7, "stopped by SIGUSR2"

    def __new__(cls, number: int, reason: str = "") -> Self:
        code = int.__new__(cls, number)
        code._value_, code.reason = number, reason
        return code

    @property
    def is_patient(self) -> bool:
        """Whether a running evaluation may finish first: nobody is about to kill the run."""
        return self in (StopCode.TIME_LIMIT, StopCode.PRUNED)


_CODE_OF_SIGNAL = {
    signal.SIGTERM: StopCode.SIGTERM,
    signal.SIGINT: StopCode.CTRL_C,
    signal.SIGHUP: StopCode.SIGTERM,
    signal.SIGUSR1: StopCode.SIGUSR1,
    signal.SIGUSR2: StopCode.SIGUSR2,
}


class StopRequest:
    """This rank's request to stop. The first one counts, but an urgent one replaces a patient one.

    `min_evaluation_seconds`: no request interrupts an evaluation that has taken less time.
    """

    def __init__(
        self, *, min_evaluation_seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.min_evaluation_seconds = min_evaluation_seconds
        self.is_training = False
        """Whether a training runs that can read the request and save a checkpoint."""
        self._clock, self._code = clock, StopCode.NONE
        self._deadline = float("inf")

    def request(self, code: StopCode) -> None:
        """Ask the training to stop. Safe in a signal handler. Repeating it changes nothing."""
        if self._code == StopCode.NONE or (self._code.is_patient and not code.is_patient):
            self._code = code

    def limit_minutes(self, minutes: float | None) -> None:
        """Request TIME_LIMIT once `minutes` have passed from now. None removes the limit."""
        self._deadline = float("inf") if minutes is None else self._clock() + 60 * minutes

    @property
    def code(self) -> StopCode:
        if self._clock() > self._deadline:
            self.request(StopCode.TIME_LIMIT)
        return self._code

    @property
    def urgent_code(self) -> StopCode:
        """The code, or NONE if the request can wait for an evaluation."""
        return StopCode.NONE if self.code.is_patient else self.code


def most_urgent(codes: Iterable[int]) -> StopCode:
    """Return which of several ranks' codes counts."""
    found = [StopCode(code) for code in codes]
    return max(found, key=lambda code: (code != StopCode.NONE, not code.is_patient, code))


def next_interval(interval: int, seconds_each: float, most: int = LONGEST_WINDOW) -> int:
    """Return how many steps or batches to do until the ranks talk again.

    About a second's worth, and at most twice the last `interval`. Every rank computes the same
    number if `seconds_each` is the same.
    """
    fitting = int(_REPORT_SECONDS / max(seconds_each, 1e-9))
    return max(1, min(2 * interval, fitting, most, LONGEST_WINDOW))


class EvaluationInterrupted(Exception):
    """A request to stop interrupted an evaluation between two batches."""

    def __init__(self, code: StopCode) -> None:
        super().__init__(code.reason)
        self.code = code


class StopPoll:
    """Interrupts one evaluation, which begins now, once any rank has an urgent request to stop.

    A forward may be a collective, so all ranks leave after the same number of batches.
    """

    def __init__(self, world: World, stop: StopRequest) -> None:
        self._world, self._stop = world, stop
        self._interval, self._batches = 1, 0
        self._seconds, self._last_poll = 0.0, world.now()

    def check(self) -> None:
        """Raise EvaluationInterrupted on every rank if the evaluation must end now.

        Every rank calls it before each batch. It is a collective and a wait for the device every
        `MOST_BATCHES` batches, or about once a second if these take longer. Otherwise it costs
        nothing.
        """
        if self._batches < self._interval:
            self._batches += 1
            return
        now = self._world.now()
        mine = torch.tensor([self._stop.urgent_code, now - self._last_poll], dtype=torch.float64)
        codes, seconds = self._world.gather(mine).T.tolist()
        # The slowest rank's time counts, so that every rank computes the same interval.
        self._interval = next_interval(self._interval, max(seconds) / self._batches, MOST_BATCHES)
        self._batches, self._last_poll = 1, now
        self._seconds += max(seconds)
        # A short evaluation ends soon, and its metrics are worth having.
        if any(codes) and self._seconds >= self._stop.min_evaluation_seconds:
            raise EvaluationInterrupted(most_urgent(map(int, codes)))


def handle_signals(stop: StopRequest, pruned: Path | None = None) -> None:
    """Let stop signals set `stop`, and let SIGQUIT raise KeyboardInterrupt. Main thread only.

    `pruned`: of a trial, the file that its search writes before it prunes it by SIGUSR2.
    A signal that came earlier, while the launcher held signals back, arrives now.
    """

    def handle(received: int, _frame: FrameType | None) -> None:
        code = _CODE_OF_SIGNAL[signal.Signals(received)]
        # Schedulers send SIGUSR2, too, before they take the machine away.
        if code == StopCode.SIGUSR2 and pruned is not None and pruned.exists():
            code = StopCode.PRUNED
        stop.request(code)

    for number in signals.handled_signals(_CODE_OF_SIGNAL):
        signal.signal(number, handle)
    signal.signal(signal.SIGQUIT, signal.default_int_handler)
    signals.unblock()


def end_with_launcher(stop: StopRequest) -> None:
    """End this process soon after its launcher.

    If the launcher dies, a training may stop with a checkpoint for two minutes. Then the process
    kills itself. Before and after the training it does so at once.
    """
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def follow() -> None:
        launcher.join()
        stop.request(StopCode.LAUNCHER_DIED)
        deadline = time.monotonic() + _ORPHAN_SECONDS
        while stop.is_training and time.monotonic() < deadline:
            time.sleep(0.1)
        # torchrun's agent would make the process wait for an answer of the launcher.
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="launcher", daemon=True).start()

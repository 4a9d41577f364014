"""The only way back into a run: ask it to stop, and why. Every rank reads the answer at the same step."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType

import torch

from rankzero.launch import signals
from rankzero.training.distributed.world import World

REASONS = {
    1: "stopped by SIGTERM",
    2: "stopped by Ctrl-C",
    3: "reached train.limits.max_minutes",
    4: "pruned",
    5: "stopped by SIGUSR1",
    6: "stopped because the launching process died",
}
SIGTERM, SIGINT, TIME_LIMIT, PRUNED, SIGUSR1, LAUNCHER_DIED = REASONS
PATIENT = (TIME_LIMIT, PRUNED)
"""Wishes of those who can wait for an evaluation: nobody is about to kill the run."""
_CODES = {
    signal.SIGTERM: SIGTERM,
    signal.SIGINT: SIGINT,
    signal.SIGHUP: SIGTERM,
    signal.SIGUSR1: SIGUSR1,
    signal.SIGUSR2: PRUNED,
}
ORPHAN_SECONDS = 120.0  # what a rank whose launcher died gets to stop with a checkpoint
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


class Stop:
    """This rank's wish to stop: a code of `REASONS`, 0 for none. The first wish counts, a patient one least."""

    def __init__(self) -> None:
        self._code = 0
        self._deadline = float("inf")
        self.training = False
        """Whether there is a training that hears a wish, and something to save."""

    def limit(self, minutes: float | None) -> None:
        """Ask the run to stop once `minutes` have passed from now; None: never."""
        self._deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes

    def __call__(self, code: int) -> None:
        """Ask the run to stop. Safe in a signal handler; repeating it changes nothing."""
        if self._code == 0 or (self._code in PATIENT and code not in PATIENT):
            self._code = code

    @property
    def code(self) -> int:
        if time.monotonic() > self._deadline:
            self(TIME_LIMIT)
        return self._code

    @property
    def urgent(self) -> int:
        """The same, and 0 for a patient wish."""
        return 0 if self.code in PATIENT else self.code


def most_urgent(codes: Iterable[int]) -> int:
    """Return which of several ranks' wishes counts, 0 where there is none."""
    return max(codes, key=lambda code: (code != 0, code not in PATIENT, code))


def listen(stop: Stop) -> None:
    """Let SIGTERM, SIGINT and a search's SIGUSR2 set `stop`, and SIGQUIT end this process at once. Main thread only.

    What came before, while signals were held, is heard now.
    """
    for number in signals.handled_signals(_CODES):
        signal.signal(number, lambda received, _frame: stop(_CODES[signal.Signals(received)]))
    signal.signal(signal.SIGQUIT, _interrupt)
    signals.unblock()


def end_with_launcher(stop: Stop) -> None:
    """See to it that this process does not outlive its launcher, nor the server it was forked from.

    The launcher's death is a wish to stop, with a checkpoint. Then, or two minutes later, the process ends, as it does
    at once before and after the training: PyTorch's agent would have it wait for the launcher's answer. Nobody could
    start ranks again whose server died, or know of them: they end with it.
    """
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def follow() -> None:
        launcher.join()
        stop(LAUNCHER_DIED)
        deadline = time.monotonic() + ORPHAN_SECONDS
        while stop.training and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="launcher", daemon=True).start()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


REPORT_SECONDS = 1.0
LONGEST_WINDOW = 1000  # steps: bounds what a SIGKILL can take, and the host's list of tensors
LEAST_SECONDS = 1.0  # of an evaluation that is left: a short one is soon over, and worth having
MOST_BATCHES = 32  # from one agreement to the next: they may get slower on the way


def next_length(length: int, step_seconds: float, most: int = LONGEST_WINDOW) -> int:
    """Return the next window's steps: about a second's worth, at most twice the last. The same on every rank."""
    fitting = int(REPORT_SECONDS / max(step_seconds, 1e-9))
    return max(1, min(2 * length, fitting, most, LONGEST_WINDOW))


class EvaluationInterrupted(Exception):
    """An evaluation was left: `code` says what for."""

    def __init__(self, code: int) -> None:
        super().__init__(REASONS[code])
        self.code = code


class StopPoll:
    """Whether an evaluation, which begins now, is left between two batches, because a rank was told to stop.

    Ranks agree on it after as many batches: a forward may be a collective, which all must enter or none.
    """

    def __init__(self, world: World, stop: Stop) -> None:
        self._world, self._stop = world, stop
        self._length, self._batches = 1, 0
        self._seconds, self._asked = 0.0, world.now()

    def check(self) -> None:
        """Raise Left on every rank, if the evaluation is to be left now. Every rank calls it before each batch.

        A collective, and a wait for the device, every `MOST_BATCHES` batches, or about once a second where those take
        longer; otherwise it costs nothing.
        """
        if self._batches < self._length:
            self._batches += 1
            return
        now = self._world.now()
        mine = torch.tensor([self._stop.urgent, now - self._asked], dtype=torch.float64)
        codes, seconds = self._world.gather(mine).T.tolist()
        self._length = next_length(self._length, max(seconds) / self._batches, MOST_BATCHES)
        self._batches, self._seconds, self._asked = 1, self._seconds + max(seconds), now
        if any(codes) and self._seconds >= LEAST_SECONDS:
            raise EvaluationInterrupted(most_urgent(map(int, codes)))

"""A watchdog in every rank: it ends a rank that hangs, and reports where it hung.

Without it, a rank that hangs makes all ranks wait in silence, without end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil
import torch

from rankzero.errors import UserError
from rankzero.launch import agent
from rankzero.launch.failures import Failure, FailureKind, place_of
from rankzero.mlflow_store import patience
from rankzero.training.distributed import world
from rankzero.training.metrics import window

_CHECKS = 20  # per limit
# The longest time between two checks: a shorter stop of the whole process is not noticed.
_MOST_BETWEEN = 10.0
# The first step compiles the model and starts data loaders, so it may take this many times as long.
_FIRST_STEP_FACTOR = 6.0
# A rank that waits for others gets this many times as long. So the rank that hangs ends first.
WAITING_FACTOR = 1.5
# The least time before the first step and after the last: data may have to be downloaded.
_SETUP_SECONDS = 1800.0
_SETUP = "RANKZERO_SETUP_SECONDS"
"""Other seconds, for data that take longer than half an hour to arrive, and for tests."""
# To report a hang. The disk may hang, and a stopped rank 0 answers no request.
_REPORT_SECONDS = 5.0

_TORCH = Path(torch.__file__).parent
_CUDA = f"{_TORCH / 'cuda'}{os.sep}"
WAITING_IN = (
    *(f"{_TORCH / name}{os.sep}" for name in ("distributed", "autograd", "nn/parallel")),
    _CUDA,
    world.__file__,
    window.__file__,
)
"""A rank whose innermost Python frame is in one of these waits for other ranks or its device."""

_SETTING_UP, _TRAINING, _ENDING = "in set-up", "", "after the last step"


def setup_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """Return the least time before the first step. Raises UserError for what is no number."""
    text = environ.get(_SETUP) or str(_SETUP_SECONDS)
    try:
        return patience.seconds(text)
    except ValueError as error:
        raise UserError(f"{_SETUP}={text!r} is not a number of seconds, 0 or more") from error


class Watchdog:
    """Watches the main thread's progress for the duration of `watching`.

    `minutes`: the longest time without a `beat` in `training`. None ends no rank. Before and
    after the training nothing beats: all of it together may take as long as a first step, and at
    least `setup_seconds`. `on_hang`: called with the failure before the process ends, each in a
    thread of its own. `local_processes`: the process ids of this node's ranks, by rank.
    `on_progress`: called every few seconds, in a thread of its own, if there were beats.
    `is_gpu_busy`: asked before a rank that is not seen to wait is blamed.
    """

    def __init__(
        self,
        minutes: float | None,
        rank: int,
        on_hang: Sequence[Callable[[Failure], None]],
        *,
        setup_seconds: float = _SETUP_SECONDS,
        local_processes: Mapping[int, int] | None = None,
        waiting_in: Sequence[str] = WAITING_IN,
        on_progress: Callable[[], None] = lambda: None,
        is_gpu_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._limit = math.inf if minutes is None else 60.0 * minutes
        self._rank, self._on_hang, self._setup_seconds = rank, on_hang, setup_seconds
        self._local_processes = local_processes or {}
        self._waiting_in = tuple(waiting_in)
        self._on_progress, self._is_gpu_busy = on_progress, is_gpu_busy
        self._last, self._beats = time.monotonic(), 0
        self._phase, self._waits_for = _SETTING_UP, ""
        self._over = threading.Event()
        self._interval = min(self._limit / _CHECKS, _MOST_BETWEEN)
        # The time of the last check, and the seconds of stops until then. Two threads read it.
        self._looked = math.inf, 0.0
        self.is_saving: Callable[[], bool] = lambda: False
        """Whether a checkpoint is being written, which the end of this rank would lose."""

    def beat(self, waits_for: str = "") -> None:
        """Report progress. Costs a tenth of a microsecond.

        `waits_for`: the next event, such as the end of a write, for the report of a hang.
        """
        self._last = time.monotonic()
        self._beats += 1
        self._waits_for = waits_for

    def expect_slow_step(self) -> None:
        """Allow the next step as long as the first."""
        self._last, self._beats = time.monotonic(), 0

    def may_be_ended(self) -> bool:
        """Return whether this rank neither ends by itself nor writes a checkpoint."""
        return self._phase != _ENDING and not self.is_saving()

    def suspended_seconds(self) -> float:
        """Return for how long Ctrl-Z, a scheduler or the like has stopped this whole process."""
        looked, before = self._looked
        late = time.monotonic() - looked - self._interval
        return before + late if late > self._interval else before

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the main thread for the duration of the block."""
        self._last = time.monotonic()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Expect beats for the duration of the block."""
        self._enter(_TRAINING)
        try:
            yield
        finally:
            self._enter(_ENDING)

    def _enter(self, phase: str) -> None:
        # The time comes first. The thread reads the phase first, so it never applies the limit of a
        # new phase to the time of the old one.
        self._last = time.monotonic()
        self._phase = phase

    def _watch(self) -> None:
        # When the rank was last seen to wait. If a peer's death releases it, it has not hung since
        # its last beat, but only since then.
        waited_until, beats = 0.0, self._beats
        self._looked, reporter = (time.monotonic(), 0.0), threading.Thread()
        while not self._over.wait(self._interval):
            # Time in which the whole process was stopped does not count.
            before, after = self._looked[1], self.suspended_seconds()
            self._last, waited_until = self._last + after - before, waited_until + after - before
            # A disk that hangs must not hold up this thread, nor gather others.
            if self._beats != beats and not reporter.is_alive():
                beats = self._beats
                reporter = threading.Thread(target=self._on_progress, daemon=True)
                reporter.start()
            self._looked = time.monotonic(), after
            phase = self._phase
            last, now = self._last, time.monotonic()
            allowed = self._limit
            if phase != _TRAINING or self._beats <= 1:
                allowed *= _FIRST_STEP_FACTOR
            if phase != _TRAINING:
                allowed = max(allowed, self._setup_seconds)
            # Python documents this function for debuggers. There is no other way to see where
            # another thread is, and CPython has had it since 2.5.
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            since, waits = max(last, waited_until), self._waits(frame, now - last > allowed)
            # A driver that does not answer holds this thread up, but not the process.
            self._looked = time.monotonic(), after
            if waits:
                since, allowed, waited_until = last, allowed * WAITING_FACTOR, now
            if now - since > allowed:
                self._end_process(frame, waits or "hung", now - since, phase)

    def _waits(self, frame: FrameType, is_late: bool) -> str:
        """Return how to say that the main thread waits, or "" if it does not."""
        file = frame.f_code.co_filename
        on_gpu = file.startswith(_CUDA)
        if file.startswith(self._waiting_in) and not on_gpu:
            return "waited for the others"
        # Under NCCL a rank waits wherever its code next reads a value from the GPU, or launches
        # more than fits into the GPU's queue.
        waits_for_gpu = on_gpu or (is_late and self._is_gpu_busy())
        return "waited for its GPU, or the others," if waits_for_gpu else ""

    def _end_process(self, frame: FrameType, did: str, silent_seconds: float, phase: str) -> None:
        """Report the hang, print every thread's stack, and kill this process."""
        stack = _without_command(traceback.extract_stack(frame))
        reason = " ".join(f"rank {self._rank} {did} for {silent_seconds:.0f} s {phase}".split())
        if self._waits_for:
            reason += f", waiting for {self._waits_for}"
        place = place_of(stack)
        if place:
            reason += f" ({place})"
        # A rank that is stopped cannot report it itself.
        for rank in stopped_ranks(self._local_processes):
            reason += f"; rank {rank} is stopped, by SIGSTOP or a debugger"
        error = "".join(traceback.format_list(stack))
        failure = Failure(time.time(), self._rank, reason, error, FailureKind.HANG)

        def print_stacks() -> None:
            print(
                f"{reason}; train.limits.hang_minutes sets the limit", file=sys.stderr, flush=True
            )
            faulthandler.dump_traceback(sys.stderr, all_threads=True)

        _try_for_seconds([functools.partial(call, failure) for call in self._on_hang])
        _try_for_seconds([print_stacks])
        # Nothing can wake a thread that hangs in C code, so only SIGKILL surely ends the process.
        os.kill(os.getpid(), signal.SIGKILL)


def is_busy(device: torch.device) -> bool:
    """Return whether a GPU has not done all that was launched on it, or does not answer.

    A CPU never is.
    """
    if device.type != "cuda":
        return False
    answers: list[bool] = []
    # A thread that waits in the driver may keep others out of it.
    _try_for_seconds([lambda: answers.append(torch.cuda.current_stream(device).query())])
    return answers != [True]


def _without_command(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return a rank's own frames: below them are the command's, of which the rank is a fork."""
    names = [(frame.filename, frame.name) for frame in stack]
    entry = (agent.__file__, agent.enter.__name__)
    return stack[names.index(entry) + 1 :] if entry in names else stack


def stopped_ranks(processes: Mapping[int, int]) -> list[int]:
    """Return the ranks that a signal or a debugger has stopped.

    `processes`: process ids by rank, of ranks with the same parent process as this one.
    """
    states, found = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP), []
    for rank, process in sorted(processes.items()):
        # It may have ended, or this process has no descriptor left to ask.
        with contextlib.suppress(psutil.Error, OSError):
            other = psutil.Process(process)
            # Another parent: the id is a stranger's, as in another PID namespace.
            if other.status() in states and other.ppid() == os.getppid():
                found.append(rank)
    return found


def _try_for_seconds(calls: Sequence[Callable[[], None]]) -> None:
    """Make calls that may fail, or hang on a disk or a rank, and leave them after some seconds."""

    def attempt(call: Callable[[], None]) -> None:
        # The process ends in any case, and the other calls still report the hang.
        with contextlib.suppress(Exception):
            call()

    threads = [threading.Thread(target=attempt, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _REPORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))

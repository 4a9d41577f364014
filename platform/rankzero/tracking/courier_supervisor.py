"""Starts the courier and keeps it alive."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable

from rankzero.mlflow_store.patience import grace_seconds
from rankzero.run_store import delivery_state, run_locks
from rankzero.run_store.attempt import LiveAttempt
from rankzero.tracking.retry import PAUSE_SECONDS, log
from rankzero.tracking.throttle import (
    ProcessorTime,
    end_giving_way,
    is_crowded,
    processor_time,
)

# After the training. During it, the courier is always started again.
MOST_DEATHS = 5
# Longer than an update of the packages or a restart of a file server: 127 times `pause_seconds`.
_MOST_DOUBLINGS = 7
# A courier that has delivered and lived for so long does not die of what it died of before.
_STEADY_SECONDS = 600.0
# After so long without progress, the courier may be starving: during the training, and after it.
_STARVING_SECONDS = (30.0, 2.0)
# Sooner if more than the training wants the processors: those others may never stop.
_CROWDED_SECONDS = 8.0
# It starves if it got less than this share of a processor, and waited for one half of the time.
_STARVING_SHARE, _WAITING_SHARE = 0.05, 0.5


class CourierSupervisor:
    """Runs in the recorder. Starts the courier, restarts it if it dies or starves.

    The first courier uses only idle processor time, if there is any. The supervisor holds the lock
    that permits delivery, and each courier inherits it.
    """

    def __init__(
        self,
        attempt: LiveAttempt,
        *,
        pause_seconds: float = PAUSE_SECONDS,
        starving_seconds: tuple[float, float] = _STARVING_SECONDS,
        crowded_seconds: float = _CROWDED_SECONDS,
        steady_seconds: float = _STEADY_SECONDS,
        spawn: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        processor_time: Callable[[int], ProcessorTime | None] = processor_time,
        is_crowded: Callable[[], bool] = is_crowded,
    ) -> None:
        self._attempt, self._spawn, self._processor_time = attempt, spawn, processor_time
        self._pause_seconds, self._starving_seconds = pause_seconds, starving_seconds
        self._crowded_seconds, self._is_crowded = crowded_seconds, is_crowded
        self._path = delivery_state.path_of(attempt.folder, attempt.node)
        self._steady_seconds = steady_seconds
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader, self._writer = os.pipe()
        self._started, self._deaths, self._is_idle = time.monotonic(), 0, not is_crowded()
        self._restarts_at = 0.0
        self._finished: float | None = None
        # When the courier was last seen to have replaced delivery.json, and that file's identity.
        self._wrote_at, self._written = 0.0, (0, 0)
        # The courier's last progress, and what it had of the processors then.
        self._progress: tuple[float, ProcessorTime | None] = (0.0, None)
        # Since when tending fails, and when to try it again.
        self._failing, self._resumes_at = math.inf, 0.0

    def finish(self) -> None:
        """Signal to the courier that the journals are complete."""
        if self._finished is None:
            self._finished = time.monotonic()
            # The cause of its deaths may be over by now.
            self._deaths, self._restarts_at = min(self._deaths, MOST_DEATHS - 1), 0.0
            os.close(self._writer)

    def tend(self) -> bool:
        """Start the courier when it is due; return whether there is still one to tend.

        Errors, such as no memory for a process, are retried after a pause. Once rank 0 has ended,
        the retries stop after `grace_seconds`.
        """
        now = time.monotonic()
        if now < self._resumes_at:
            return True
        try:
            left = self._tend()
        except Exception:
            if self._failing == math.inf:
                # Logged once, because it may last as long as the training.
                self._failing = now
                log.exception("the courier cannot be tended; trying again")
            self._resumes_at = now + self._pause_seconds
            finished = self._finished
            return finished is None or now - max(self._failing, finished) < grace_seconds()
        self._failing = math.inf
        return left

    def _tend(self) -> bool:
        process = self._process
        if process is None:
            if self._finished is not None and self._deaths >= MOST_DEATHS:
                return False
            if self._attempt.is_latest and time.monotonic() < self._restarts_at:
                return True
            return self._start() or self._finished is None
        code = process.poll()
        if code == 0:
            return False
        if code is not None:
            # An import that fails, for example, fails every time. A disk that cannot be read
            # recovers, so the pauses grow: 0, 1, 3, 7 … times `pause_seconds`.
            self._look()
            lived = time.monotonic() - self._started
            is_steady = lived > self._steady_seconds and self._wrote_at > self._started
            self._deaths = 1 if is_steady else self._deaths + 1
            pause = self._pause_seconds * (2 ** min(self._deaths - 1, _MOST_DOUBLINGS) - 1)
            self._process, self._restarts_at = None, time.monotonic() + pause
            log.warning("the courier ended with %d, %d times by now", code, self._deaths)
            return self._tend()
        self._look()
        # A courier that has done nothing yet only keeps the lock from a newer attempt's courier.
        outdated = self._finished is not None and not self._attempt.is_latest
        if outdated and self._wrote_at <= self._started:
            process.kill()
            process.wait()
            return False
        if self._is_idle and self._starves(process.pid):
            self._is_idle = False
            # After the training it takes nothing from it, and keeps what it has imported.
            if self._finished is None or not end_giving_way(process.pid):
                log.info("no processor is idle: starting another courier at normal priority")
                process.kill()
                process.wait()
                self._start()
        return True

    def _starves(self, process: int) -> bool:
        """Return whether the idle courier makes no progress because others have the processors."""
        since = max(self._started, self._wrote_at, self._finished or 0.0)
        now, time_now = time.monotonic(), self._processor_time(process)
        if since != self._progress[0]:
            self._progress = (since, time_now)
        before, elapsed = self._progress[1], now - since
        limit = self._starving_seconds[self._finished is not None]
        if elapsed < limit and (elapsed < self._crowded_seconds or not self._is_crowded()):
            return False
        if before is None or time_now is None:
            return self._wrote_at <= self._started
        # A courier that waits for MLflow, or has nothing to do, does not wait for a processor.
        return (
            time_now.used - before.used < _STARVING_SHARE * elapsed
            and time_now.waited - before.waited > _WAITING_SHARE * elapsed
        )

    def _look(self) -> None:
        """Note whether the courier has replaced delivery.json. Only this process's clock counts."""
        try:
            file = self._path.stat()
        except OSError:
            return
        if self._written != (file.st_ino, file.st_mtime_ns):
            self._written, self._wrote_at = (file.st_ino, file.st_mtime_ns), time.monotonic()

    def _start(self) -> bool:
        """Start the courier once an older one has released its lock.

        Return whether it is started or still waited for.
        """
        if not self._attempt.is_latest:
            return False
        folder, node = self._attempt.folder, self._attempt.node
        if self._lock is None:
            self._lock = run_locks.acquire(folder, node)
        # An older attempt's courier may still deliver. It sees this attempt's claim and ends soon.
        if self._lock is None:
            return time.monotonic() - (self._finished or self._started) < grace_seconds()
        self._look()
        now = time.monotonic()
        # The courier that it replaces has delivered nothing since then.
        behind = 0.0 if self._is_idle else now - max(self._started, self._wrote_at)
        self._started = now
        command = [
            *(sys.executable, "-P", "-m", "rankzero.tracking.courier", str(folder.path)),
            *("--token", self._attempt.token, "--node", str(node), "--pipe", str(self._reader)),
            *(["--idle"] if self._is_idle else ["--behind", f"{behind:.1f}"]),
        ]
        # If no process can be made, that is not the death of one.
        self._process = None
        self._process = self._spawn(
            command, pass_fds=(self._reader, self._lock), start_new_session=True
        )
        return True

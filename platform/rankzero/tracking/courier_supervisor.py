"""Starts the courier and keeps it alive."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable

from rankzero.mlflow_store.patience import grace_seconds
from rankzero.run_store import claims, delivery_state
from rankzero.run_store.attempt import LiveAttempt
from rankzero.tracking.retry import PAUSE_SECONDS, log

MOST_DEATHS = 5


class CourierSupervisor:
    """Runs in the recorder. Starts the courier, restarts it if it dies.

    It holds the lock that permits delivery, and each courier inherits it.
    """

    def __init__(
        self,
        attempt: LiveAttempt,
        *,
        pause_seconds: float = PAUSE_SECONDS,
        spawn: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        self._attempt, self._spawn = attempt, spawn
        self._pause_seconds = pause_seconds
        self._path = delivery_state.path_of(attempt.folder, attempt.node)
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader, self._writer = os.pipe()
        self._started, self._deaths = time.monotonic(), 0
        self._finished: float | None = None
        # When the courier was last seen to have replaced delivery.json, and that file's identity.
        self._wrote_at, self._written = 0.0, (0, 0)
        # Since when tending fails, and when to try it again.
        self._failing, self._resumes_at = math.inf, 0.0

    def finish(self) -> None:
        """Signal to the courier that the journals are complete."""
        if self._finished is None:
            self._finished = time.monotonic()
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
            return self._start() or self._finished is None
        code = process.poll()
        if code == 0:
            return False
        if code is not None:
            # An import that fails, for example, fails every time.
            self._deaths += 1
            if self._deaths <= MOST_DEATHS:
                log.warning("the courier ended with %d, %d times by now", code, self._deaths)
            return self._deaths < MOST_DEATHS and self._start()
        self._look()
        # A courier that has done nothing yet only keeps the lock from a newer attempt's courier.
        outdated = self._finished is not None and not self._attempt.is_latest
        if outdated and self._wrote_at <= self._started:
            process.kill()
            process.wait()
            return False
        return True

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
            self._lock = claims.acquire(folder, node)
        # An older attempt's courier may still deliver. It sees this attempt's claim and ends soon.
        if self._lock is None:
            return time.monotonic() - (self._finished or self._started) < grace_seconds()
        self._look()
        self._started = time.monotonic()
        command = [
            *(sys.executable, "-P", "-m", "rankzero.tracking.courier", str(folder.path)),
            *("--token", self._attempt.token, "--node", str(node), "--pipe", str(self._reader)),
        ]
        # If no process can be made, that is not the death of one.
        self._process = None
        self._process = self._spawn(
            command, pass_fds=(self._reader, self._lock), start_new_session=True
        )
        return True

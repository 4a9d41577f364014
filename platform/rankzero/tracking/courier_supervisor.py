"""Starts the courier and keeps it alive."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

from rankzero.run_store import claims
from rankzero.run_store import delivery_state as state
from rankzero.run_store.attempt import LiveAttempt
from rankzero.tracking.courier import MODEST
from rankzero.tracking.retry import PAUSE_SECONDS, grace_seconds, log

IDLE_SECONDS = 30.0  # how long to hope for processor time that nobody wants
UNWANTED = 0  # for a nice value: only what nobody wants
MOST_DEATHS = 5
FAIR = 1  # once rank 0 has ended: about what everybody gets


class CourierSupervisor:
    """The recorder's courier: started, started again if it dies or gets nowhere. Holds the right to deliver."""

    def __init__(self, attempt: LiveAttempt) -> None:
        self._attempt = attempt
        self._right: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader, self._writer = os.pipe()
        self._started, self._deaths, self._nice = time.monotonic(), 0, UNWANTED
        self._finished: float | None = None
        self._heard = 0.0  # when it was last seen to have written down how far it is
        self._written = (0, 0)
        self._failing = math.inf  # since when it cannot be tended
        self._rests_until = 0.0

    def finish(self) -> None:
        """Tell the courier that the journals are complete."""
        if self._finished is None:
            self._finished = time.monotonic()
            os.close(self._writer)

    def tend(self) -> bool:
        """Start the courier when it is due; return whether there is still one to tend.

        What fails, as where there is no memory for a process or a lock cannot be made, is tried again after a pause;
        once rank 0 has ended, for `grace_seconds`.
        """
        if time.monotonic() < self._rests_until:
            return True
        try:
            left = self._tend()
        except Exception:
            return self._is_tried_again()
        self._failing = math.inf
        return left

    def _is_tried_again(self) -> bool:
        now = time.monotonic()
        if self._failing == math.inf:  # said once: it may go on for as long as the training does
            self._failing = now
            log.exception("the courier cannot be tended; trying again")
        self._rests_until = now + PAUSE_SECONDS
        return self._finished is None or now - max(self._failing, self._finished) < grace_seconds()

    def _tend(self) -> bool:
        if self._process is None:
            return self._start() or self._finished is None
        code = self._process.poll()
        if code == 0:
            return False
        if code is not None:
            return self._start_again(code)
        if self._imports_in_vain():
            self._process.kill()
            self._process.wait()
            return False
        if self._starves():
            self._nice = MODEST if self._finished is None else FAIR
            log.info(
                "no processor has been idle for %d s: going on at nice %d", IDLE_SECONDS, self._nice
            )
            self._process.kill()
            self._process.wait()
            self._start()
        return True

    def _starves(self) -> bool:
        """Tell whether it gets nowhere for want of a processor: since its start, or after the end of rank 0.

        After that end it may be given more: what it takes, it no longer takes from the training. Where MLflow is
        away it says so, and is left alone.
        """
        self._listen()
        over = self._finished is not None
        if self._nice == FAIR or (
            not over and (self._nice == MODEST or self._heard > self._started)
        ):
            return False
        if (
            time.monotonic() - max(self._started, self._heard, self._finished or 0.0)
            <= IDLE_SECONDS
        ):
            return False
        progress = state.load(state.path_of(self._attempt.folder, self._attempt.node))
        return progress.error is None and self._attempt.folder.path.exists()

    def _imports_in_vain(self) -> bool:
        """Tell whether it has done nothing yet, and a newer attempt waits for the right that it holds."""
        if self._finished is None or self._attempt.is_latest:
            return False
        self._listen()
        return self._heard <= self._started

    def _listen(self) -> None:
        """Note when the file in which it says how far it is was replaced. No clock but this process's own is asked."""
        try:
            file = state.path_of(self._attempt.folder, self._attempt.node).stat()
        except OSError:
            return
        if self._written != (file.st_ino, file.st_mtime_ns):
            self._written, self._heard = (file.st_ino, file.st_mtime_ns), time.monotonic()

    def _start(self) -> bool:
        """Start it, once an older recorder has let go of the run; return whether it is started or to be waited for."""
        if not self._attempt.is_latest:
            return False
        folder, node = self._attempt.folder, self._attempt.node
        if self._right is None:
            self._right = claims.acquire(folder, node)
        if self._right is None:
            return time.monotonic() - (self._finished or self._started) < grace_seconds()
        self._listen()
        self._started = time.monotonic()
        command = [
            *(sys.executable, "-P", "-m", "rankzero.tracking.courier", str(folder.path)),
            *("--token", self._attempt.token, "--node", str(node), "--pipe", str(self._reader)),
            *("--nice", str(self._nice)),
        ]
        self._process = None  # where none can be made: that is no death of one
        self._process = subprocess.Popen(
            command, pass_fds=(self._reader, self._right), start_new_session=True
        )
        return True

    def _start_again(self, code: int) -> bool:
        if self._deaths == MOST_DEATHS:
            return False
        self._deaths += 1
        log.warning("the courier ended with %d, %d times by now", code, self._deaths)
        return self._deaths < MOST_DEATHS and self._start()

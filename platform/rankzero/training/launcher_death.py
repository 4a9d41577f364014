"""Ends a rank whose launcher has died."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

from rankzero.training.stop import StopCode, StopRequest

# Seconds that a rank whose launcher died may take to stop with a checkpoint.
ORPHAN_SECONDS = 120.0


def end_with_launcher(stop: StopRequest) -> None:
    """End this process soon after its launcher.

    If the launcher dies, a training may stop with a checkpoint for `ORPHAN_SECONDS`. Then the
    process kills itself. Before and after the training it does so at once.
    """
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def follow() -> None:
        launcher.join()
        stop.request(StopCode.LAUNCHER_DIED)
        deadline = time.monotonic() + ORPHAN_SECONDS
        while stop.is_training and time.monotonic() < deadline:
            time.sleep(0.1)
        # torchrun's agent would make the process wait for an answer of the launcher.
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="launcher", daemon=True).start()

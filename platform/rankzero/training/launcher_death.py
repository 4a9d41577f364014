"""Ends a rank whose launcher has died."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

from rankzero.training.stop import StopCode, StopRequest

# Seconds that a rank whose launcher died may take to stop with a checkpoint.
ORPHAN_SECONDS = 120.0
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def end_with_launcher(stop: StopRequest) -> None:
    """End this process soon after its launcher, and at once with the server it was forked from.

    If the launcher dies, a training may stop with a checkpoint for `ORPHAN_SECONDS`. Then the
    process kills itself. Before and after the training it does so at once.
    """
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return
    # Without the fork server nobody can restart ranks or knows of them. Linux ends them with it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def follow() -> None:
        launcher.join()
        stop.request(StopCode.LAUNCHER_DIED)
        deadline = time.monotonic() + ORPHAN_SECONDS
        while stop.is_training and time.monotonic() < deadline:
            time.sleep(0.1)
        # torchrun's agent would make the process wait for an answer of the launcher.
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="launcher", daemon=True).start()

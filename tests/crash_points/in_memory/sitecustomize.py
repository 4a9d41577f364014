"""Every recorded Python process imports this at its start. The courier gets the store in memory."""

import os
import sys

if "rankzero.tracking.courier" in sys.orig_argv:
    from pathlib import Path

    from rankzero.tracking import open_run
    from support.memory_store import MemoryStore

    open_run.connect = lambda uri: MemoryStore(Path(os.environ["CRASH_ROOT"]) / "mlflow")

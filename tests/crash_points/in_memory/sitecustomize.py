"""Every recorded Python process imports this at its start. The courier gets the store in memory."""

import os
import sys

if "rankzero.tracking.courier" in sys.orig_argv:
    from pathlib import Path

    from crash_points.memory_store import MemoryStore
    from rankzero.tracking import open_run

    open_run.connect = lambda uri: MemoryStore(Path(os.environ["CRASH_ROOT"]) / "mlflow")

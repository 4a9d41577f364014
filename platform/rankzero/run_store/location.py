"""Which folder holds the embedded store and the runs. Imports next to nothing: every command asks."""

from __future__ import annotations

import os
from pathlib import Path


def root_of(folder: str | Path | None) -> Path:
    """Return the folder of the embedded store and of the runs: this one, else $RANKZERO_DIR, else ./mlruns."""
    return Path(folder or os.environ.get("RANKZERO_DIR") or "mlruns")

"""Output that takes whatever comes: that of an ASCII locale lacks most characters, and nothing is to end of that."""

from __future__ import annotations

import io
import sys


def take_anything() -> None:
    """Let this process's output show what its encoding lacks as escapes. For processes of ours, not for programs."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")

"""Output in encodings that lack characters, such as an ASCII locale's."""

from __future__ import annotations

import io
import sys


def escape_unencodable() -> None:
    """Let this process print characters that its output's encoding lacks as escapes.

    For processes of ours, not for users' programs.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")

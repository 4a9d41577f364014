"""Encodings that lack characters, such as an ASCII locale's: of the output and of paths."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rankzero.errors import UserError


def escape_unencodable() -> None:
    """Let this process print characters that its output's encoding lacks as escapes.

    For processes of ours, not for users' programs.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def refuse_paths_in_ascii(words: Sequence[str]) -> None:
    """Raise UserError for an umlaut in a command's words that Python decoded as ASCII.

    Its variables must forbid UTF-8 for that: in the C locale it takes UTF-8 by itself. Such a path
    cannot be written into the journal, into SQLite or into MLflow.
    """
    if sys.getfilesystemencoding() != "ascii":
        return
    for text in (*words, str(Path.cwd()), os.environ.get("RANKZERO_DIR", "")):
        if not text.isascii():
            path = os.fsencode(text).decode(errors="replace")
            raise UserError(
                f"{path!r} is not ASCII, and the locale and Python's settings allow only ASCII; "
                "write PYTHONUTF8=1 before the command"
            )

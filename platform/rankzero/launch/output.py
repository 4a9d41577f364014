"""The standard streams: encodings that lack characters, closed ones, and output on a full disk.

Paths in an ASCII locale, too.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rankzero.errors import UserError


def escape_unencodable() -> None:
    """Let this process print characters that its output's encoding lacks as escapes.

    For processes of ours, not for users' programs.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


class _LossyFile(io.FileIO):
    """A file that drops what the system refuses to write."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


@contextlib.contextmanager
def drops_what_does_not_fit() -> Iterator[None]:
    """Let a print inside the block raise no error where the output's disk is full."""
    kept, made = (sys.stdout, sys.stderr), list[io.TextIOWrapper]()
    for name, stream in zip(("stdout", "stderr"), kept, strict=True):
        if isinstance(stream, io.TextIOWrapper):
            raw = _LossyFile(stream.fileno(), "w", closefd=False)
            # With PYTHONUNBUFFERED, a rank that is killed loses no word.
            file: Any = raw if stream.write_through else io.BufferedWriter(raw)
            how = (stream.line_buffering, stream.write_through)
            own = io.TextIOWrapper(file, stream.encoding, stream.errors, None, *how)
            made.append(own)
            setattr(sys, name, own)
    try:
        yield
    finally:
        for each in made:
            with contextlib.suppress(ValueError):  # the user's code may have closed it
                each.flush()
        sys.stdout, sys.stderr = kept


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that was closed when this process started.

    Else the next files of this process would have these descriptors, and its children print there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest one that is free: the stream's own.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


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

"""How commands print: coloured and fitting a terminal, plain and untruncated into a pipe."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

# Columns, so that nothing is truncated.
_PIPE_WIDTH = 10_000


def text_console() -> Console:
    """Return a console for foreign text, which it neither wraps nor takes for markup."""
    file = cast("IO[str]", _Shown(sys.stdout))
    return Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_line(*values: object) -> None:
    """Print at once, also into a file or a pipe. Drops what a full disk refuses."""
    print(*values, file=cast("IO[str]", _Shown(sys.stdout)), flush=True)


class _Shown:
    """A stream whose errors end nothing: its disk is full, or its terminal has been closed.

    A run is worth more than what is shown of it. `BrokenPipeError` is raised as ever.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _no_error_but_a_broken_pipe():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _no_error_but_a_broken_pipe():
            self._stream.flush()


@contextlib.contextmanager
def _no_error_but_a_broken_pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass


def table_console() -> Console:
    """Return a console for tables with markup; foreign text in them must be escaped."""
    # rich has colours on a terminal only, and follows NO_COLOR.
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(highlight=False, emoji=False, width=width)


def print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print a table. A terminal folds what is too wide, and a pipe gets all of it."""
    table = Table(title=escape(title), title_justify="left", padding=(0, 0))
    for name in head:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        # As Text: values may look like markup.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    table_console().print(table)


def is_interactive() -> bool:
    """Return whether output may be drawn over: on a terminal."""
    # FORCE_COLOR does not count, because notebooks and CI set it.
    return sys.stdout.isatty()


def warn_if_interrupt_is_ignored() -> None:
    """Print once that Ctrl-C cannot stop this command, if SIGINT was ignored when it started."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        print(
            "note: Ctrl-C does not stop this command, because it was started with SIGINT ignored "
            "(as a script's background jobs are); SIGTERM stops it",
            file=sys.stderr,
            flush=True,
        )

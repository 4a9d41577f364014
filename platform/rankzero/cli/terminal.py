"""How commands print: as wide as the terminal, with colours; into a pipe plainly, and nothing cut off."""

from __future__ import annotations

import sys

from rich.console import Console

ENDLESS = 10_000  # columns


def plain_or_fitting() -> Console:
    """Return where tables go. Colours are for terminals, and follow NO_COLOR."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else ENDLESS)


def is_interactive() -> bool:
    """Tell whether output may be drawn over: on a terminal, whatever FORCE_COLOR says, which notebooks and CI set."""
    return sys.stdout.isatty()

"""How commands print: as wide as the terminal, with colours; into a pipe plainly, and nothing cut off."""

from __future__ import annotations

import sys

from rich.console import Console

ENDLESS = 10_000  # columns


def as_it_is(*, soft_wrap: bool = False) -> Console:
    """Return where text of others goes: brackets and colons in it are no markup. What is styled comes as `Text`."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)


def plain_or_fitting() -> Console:
    """Return where tables go. Colours are for terminals, and follow NO_COLOR. Text of others is to be escaped."""
    return Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else ENDLESS)


def is_interactive() -> bool:
    """Tell whether output may be drawn over: on a terminal, whatever FORCE_COLOR says, which notebooks and CI set."""
    return sys.stdout.isatty()

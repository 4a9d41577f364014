"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. The caller replaces what would end a cell: see `inline`."""
    # MLflow's page sets columns without any gap.
    first, *others = ["&emsp; | ".join(line) for line in (head, *rows)]
    return "\n".join(f"| {line} |" for line in (first, " | ".join(["---"] * len(head)), *others))


def inline(text: str) -> str:
    """Return the text on one line, so that no value of a user breaks the page."""
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'").replace("<", "‹")

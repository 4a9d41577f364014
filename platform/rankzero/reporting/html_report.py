"""Runs as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from rankzero.reporting import comparison, html_page
from rankzero.reporting.comparison import RunSide


def differences(sides: Sequence[RunSide]) -> str:
    """Return what differs between runs as one table, so that the columns are aligned."""
    rows: list[tuple[str, ...]] = []
    for title, found in comparison.sections(sides).items():
        rows += [(title,), *((row.key, *row.values, row.change) for row in found)]
    return html_page.table(("", *(side.name for side in sides), ""), rows)

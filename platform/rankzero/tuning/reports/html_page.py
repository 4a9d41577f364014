"""Interactive figures on one page that opens without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

_STYLE = "body{font-family:sans-serif;max-width:1100px;margin:1em auto}"


def page(figures: Sequence[Any], title: str) -> str:
    """Return an HTML page with plotly figures, and with plotly itself inside."""
    import plotly.io

    # Plotly's script comes with the first figure only: it is 4 MB.
    parts = [
        plotly.io.to_html(figure, full_html=False, include_plotlyjs=number == 0)
        for number, figure in enumerate(figures)
    ]
    title = html.escape(title, quote=False)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h2>{title}</h2>{''.join(parts)}</body></html>"
    )

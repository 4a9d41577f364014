"""Figures as PNGs. matplotlib draws those of plotly once more: plotly itself needs a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_DOTS_PER_INCH = 120


def write_all(folder: Path, figures: dict[str, Any]) -> None:
    """Write plotly's figures by name: heat maps, horizontal bars, or lines and points."""
    from matplotlib.figure import Figure

    for name, figure in figures.items():
        kind, rows = figure.data[0].type, len(figure.data[0].y)
        size = {"heatmap": (9, 1.6 + 0.6 * rows), "bar": (9, 1.2 + 0.4 * rows)}.get(kind, (8, 5))
        # Not by pyplot, which keeps every figure.
        drawn = Figure(figsize=size, layout="constrained")
        axes, layout = drawn.subplots(), figure.layout
        for trace in figure.data:
            _DRAW[kind](axes, trace)
        texts = {"xlabel": layout.xaxis.title.text, "ylabel": layout.yaxis.title.text}
        axes.set(title=layout.title.text, **{key: text or "" for key, text in texts.items()})
        save(drawn, folder / f"{name}.png")


def save(drawn: Any, path: Path, **options: Any) -> None:
    """Write a figure of matplotlib."""
    path.unlink(missing_ok=True)  # a planted link would be followed
    drawn.savefig(path, dpi=_DOTS_PER_INCH, **options)


def _draw_heat_map(axes: Any, trace: Any) -> None:
    axes.imshow(trace.z, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(trace.x)), trace.x)
    axes.set_yticks(range(len(trace.y)), trace.y)
    for y, row in enumerate(trace.text):
        for x, text in enumerate(row):
            lines = text.replace("<br>", "\n")
            axes.text(x, y, lines, ha="center", va="center", color="white", fontsize=7)


def _draw_bars(axes: Any, trace: Any) -> None:
    ends = trace.error_x.arrayminus, trace.error_x.array
    axes.barh(trace.y, trace.x, xerr=ends, color=trace.marker.color, capsize=3)
    axes.invert_yaxis()


def _draw_points(axes: Any, trace: Any) -> None:
    ends = {
        "xerr": (trace.error_x.arrayminus, trace.error_x.array),
        "yerr": (trace.error_y.arrayminus, trace.error_y.array),
    }
    style = "-" if trace.mode == "lines" else "o"
    axes.errorbar(trace.x, trace.y, fmt=style, label=trace.name, capsize=3, **ends)
    for x, y, text in zip(trace.x, trace.y, trace.text, strict=False):
        axes.annotate(text, (x, y), xytext=(4, 4), textcoords="offset points")
    axes.legend()


_DRAW = {"heatmap": _draw_heat_map, "bar": _draw_bars, "scatter": _draw_points}

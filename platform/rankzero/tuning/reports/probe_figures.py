"""The probe map as a heat map: for the page by plotly, and as a PNG by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankzero.tuning.probe.grid import ProbeResult

_DOTS_PER_INCH = 120


def heat_map(measured: Sequence[ProbeResult]) -> Any:
    """Return a plotly figure of the samples/s by batch size and precision."""
    import plotly.graph_objects as go

    sizes, precisions, rows = _grid(measured)
    return go.Figure(
        go.Heatmap(
            z=[[one.samples_per_second if one else None for one in row] for row in rows],
            x=[str(size) for size in sizes],
            y=precisions,
            text=[[_label(one, "<br>") for one in row] for row in rows],
            texttemplate="%{text}",
            colorscale="Viridis",
        ),
        layout={
            "title": "Probe map: samples/s",
            "xaxis_title": "batch size",
            "xaxis_type": "category",
        },
    )


def write_png(folder: Path, measured: Sequence[ProbeResult]) -> None:
    """Write ``probe_map.png``."""
    from matplotlib.figure import Figure

    sizes, precisions, rows = _grid(measured)
    # Not by pyplot, which keeps every figure.
    figure = Figure(figsize=(9, 1.6 + 0.6 * len(precisions)), layout="constrained")
    axes = figure.subplots()
    nothing = float("nan")
    speeds = [[one.samples_per_second if one else nothing for one in row] for row in rows]
    axes.imshow(speeds, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_yticks(range(len(precisions)), precisions)
    axes.set(xlabel="batch size", title="Probe map: samples/s, and what limits it")
    for y, row in enumerate(rows):
        for x, one in enumerate(row):
            text = _label(one, "\n")
            axes.text(x, y, text, ha="center", va="center", color="white", fontsize=7)
    path = folder / "probe_map.png"
    path.unlink(missing_ok=True)  # a planted link would be followed
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _grid(
    measured: Sequence[ProbeResult],
) -> tuple[list[int], list[str], list[list[ProbeResult | None]]]:
    """Return the batch sizes, the precisions, and a row of cells for each precision."""
    cells = {(one.precision, one.batch_size): one for one in measured if one.status == "ok"}
    sizes = sorted({size for _, size in cells})
    precisions = list(dict.fromkeys(precision for precision, _ in cells))
    return sizes, precisions, [[cells.get((name, size)) for size in sizes] for name in precisions]


def _label(one: ProbeResult | None, line_break: str) -> str:
    if one is None:
        return ""
    memory = [] if one.memory_bytes is None else [f"{one.memory_bytes / 2**30:.1f} GiB"]
    return line_break.join([f"{one.samples_per_second:,.0f}", *memory, one.bound])

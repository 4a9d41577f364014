"""The probe map as a heat map: for the page by plotly, and as a PNG by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankzero.tuning.probe.grid import ProbeResult

_DOTS_PER_INCH = 120


def heat_map(measured: Sequence[ProbeResult]) -> Any:
    """Return a plotly figure of the samples/s by batch size and precision."""
    import plotly.graph_objects as go

    sizes, precisions, speeds, labels = _grid(measured, "<br>")
    heat = go.Heatmap(
        z=speeds,
        x=sizes,
        y=precisions,
        text=labels,
        texttemplate="%{text}",
        colorscale="Viridis",
    )
    title = "Probe map: samples/s"
    axis = {"title": "batch size", "type": "category"}
    return go.Figure(heat, layout={"title": title, "xaxis": axis})


def write_png(folder: Path, measured: Sequence[ProbeResult]) -> None:
    """Write ``probe_map.png``."""
    from matplotlib.figure import Figure

    sizes, precisions, speeds, labels = _grid(measured, "\n")
    # Not by pyplot, which keeps every figure.
    figure = Figure(figsize=(9, 1.6 + 0.6 * len(precisions)), layout="constrained")
    axes = figure.subplots()
    axes.imshow(speeds, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_yticks(range(len(precisions)), precisions)
    axes.set(xlabel="batch size", title="Probe map: samples/s, and what limits it")
    for y, row in enumerate(labels):
        for x, text in enumerate(row):
            axes.text(x, y, text, ha="center", va="center", color="white", fontsize=7)
    path = folder / "probe_map.png"
    path.unlink(missing_ok=True)  # a planted link would be followed
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _grid(
    measured: Sequence[ProbeResult], line_break: str
) -> tuple[list[str], list[str], list[list[float]], list[list[str]]]:
    """Return the batch sizes, the precisions, and for each precision a row of speeds and labels."""
    cells = {(one.precision, one.batch_size): one for one in measured if one.status == "ok"}
    sizes = sorted({size for _, size in cells})
    precisions = list(dict.fromkeys(precision for precision, _ in cells))
    rows = [[cells.get((name, size)) for size in sizes] for name in precisions]
    speeds = [[one.samples_per_second if one else math.nan for one in row] for row in rows]
    labels = [[_label(one, line_break) if one else "" for one in row] for row in rows]
    return [str(size) for size in sizes], precisions, speeds, labels


def _label(one: ProbeResult, line_break: str) -> str:
    memory = [] if one.memory_bytes is None else [f"{one.memory_bytes / 2**30:.1f} GiB"]
    return line_break.join([f"{one.samples_per_second:,.0f}", *memory, one.bound])

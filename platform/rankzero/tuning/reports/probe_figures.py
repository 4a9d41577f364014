"""The probe map as a heat map, and the effects of knobs as bars: as figures of plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rankzero.scalars import shown
from rankzero.tuning.probe.grid import ProbeResult, row_names
from rankzero.tuning.probe.speed_knobs import Effect

_KEPT, _NOT_KEPT = "#2ca02c", "#999999"


def figures(measured: Sequence[ProbeResult], effects: Sequence[Effect]) -> dict[str, Any]:
    """Return ``probe_map`` and ``knobs``, if they have something to show."""
    found = {"probe_map": _heat_map(measured)} if measured else {}
    if shown := [one for one in effects if math.isfinite(one.gain)]:
        found["knobs"] = _bars(shown)
    return found


def _bars(shown: Sequence[Effect]) -> Any:
    """Draw the gains in percent, with their intervals."""
    import plotly.graph_objects as go

    bar = go.Bar(
        x=[100 * (one.gain - 1) for one in shown],
        y=[f"{one.name} ({one.decision})" for one in shown],
        error_x={
            "array": [100 * (one.high - one.gain) for one in shown],
            "arrayminus": [100 * (one.gain - one.low) for one in shown],
        },
        marker_color=[_KEPT if one.decision == "kept" else _NOT_KEPT for one in shown],
        orientation="h",
    )
    axes = {
        "xaxis": {"title": "gain in samples/s (%), with 95 % intervals"},
        "yaxis": {"autorange": "reversed"},
    }
    title = "Knobs of speed, at the knee of the probe map"
    return go.Figure(bar, layout={"title": title, **axes})


def _heat_map(measured: Sequence[ProbeResult]) -> Any:
    """Draw a row for each precision, and a column for each batch size."""
    import plotly.graph_objects as go

    able = [one for one in measured if one.status == "ok"]
    named = zip(row_names(able), able, strict=True)
    cells = {(name, one.batch_size): one for name, one in named}
    sizes = sorted({one.batch_size for one in able})
    precisions = list(dict.fromkeys(name for name, _ in cells))
    rows = [[cells.get((name, size)) for size in sizes] for name in precisions]
    heat = go.Heatmap(
        z=[[one.samples_per_second if one else math.nan for one in row] for row in rows],
        x=[str(size) for size in sizes],
        y=precisions,
        text=[[_label(one) if one else "" for one in row] for row in rows],
        texttemplate="%{text}",
        colorscale="Viridis",
        # The cells have the numbers.
        showscale=False,
    )
    axis = {"title": "batch size", "type": "category"}
    layout = {"title": "Probe map: samples/s, and what limits it", "xaxis": axis}
    return go.Figure(heat, layout)


def _label(one: ProbeResult) -> str:
    memory = [] if one.memory_bytes is None else [f"{one.memory_bytes / 2**30:.1f} GiB"]
    return "<br>".join([shown(one.samples_per_second), *memory, one.bound])

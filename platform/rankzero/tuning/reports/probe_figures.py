"""The probe map as a heat map, and the effects of knobs as bars: by plotly and by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankzero.tuning.probe.grid import ProbeResult, row_names
from rankzero.tuning.probe.speed_knobs import Effect

_DOTS_PER_INCH = 120
_KEPT, _NOT_KEPT = "#2ca02c", "#999999"
_KNOBS = "Knobs of speed, at the knee of the probe map"
_GAIN = "gain in samples/s (%), with 95 % intervals"


def interactive(measured: Sequence[ProbeResult], effects: Sequence[Effect]) -> list[Any]:
    """Return plotly figures of what was measured."""
    import plotly.graph_objects as go

    figures = [_heat_map(measured)] if measured else []
    if shown := _measured(effects):
        names, gains, below, above, colours = _bars_of(shown)
        error = {"array": above, "arrayminus": below}
        bar = go.Bar(x=gains, y=names, error_x=error, marker_color=colours, orientation="h")
        axes = {"xaxis": {"title": _GAIN}, "yaxis": {"autorange": "reversed"}}
        figures.append(go.Figure(bar, layout={"title": _KNOBS, **axes}))
    return figures


def write_pngs(folder: Path, measured: Sequence[ProbeResult], effects: Sequence[Effect]) -> None:
    """Write ``probe_map.png`` and ``knobs.png``, if they have something to show."""
    if measured:
        _save(_heat_map_figure(measured), folder / "probe_map.png")
    if shown := _measured(effects):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 1.2 + 0.4 * len(shown)), layout="constrained")
        axes, (names, gains, below, above, colours) = figure.subplots(), _bars_of(shown)
        axes.barh(names, gains, xerr=(below, above), color=colours, capsize=3)
        axes.invert_yaxis()
        axes.set(xlabel=_GAIN, title=_KNOBS)
        _save(figure, folder / "knobs.png")


def _measured(effects: Sequence[Effect]) -> list[Effect]:
    return [one for one in effects if math.isfinite(one.gain)]


_Bars = tuple[list[str], list[float], list[float], list[float], list[str]]


def _bars_of(shown: Sequence[Effect]) -> _Bars:
    """Return names, gains in percent, the interval below and above, colours."""
    return (
        [f"{one.name} ({one.decision})" for one in shown],
        [100 * (one.gain - 1) for one in shown],
        [100 * (one.gain - one.low) for one in shown],
        [100 * (one.high - one.gain) for one in shown],
        [_KEPT if one.decision == "kept" else _NOT_KEPT for one in shown],
    )


def _heat_map(measured: Sequence[ProbeResult]) -> Any:
    import plotly.graph_objects as go

    sizes, precisions, speeds, labels = _grid(measured, "<br>")
    heat = go.Heatmap(
        z=speeds,
        x=sizes,
        y=precisions,
        text=labels,
        texttemplate="%{text}",
        colorscale="Viridis",
        # The cells have the numbers.
        showscale=False,
    )
    title = "Probe map: samples/s"
    axis = {"title": "batch size", "type": "category"}
    return go.Figure(heat, layout={"title": title, "xaxis": axis})


def _heat_map_figure(measured: Sequence[ProbeResult]) -> Any:
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
    return figure


def _save(figure: Any, path: Path) -> None:
    path.unlink(missing_ok=True)  # a planted link would be followed
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _grid(
    measured: Sequence[ProbeResult], line_break: str
) -> tuple[list[str], list[str], list[list[float]], list[list[str]]]:
    """Return the batch sizes, the precisions, and for each precision a row of speeds and labels."""
    able = [one for one in measured if one.status == "ok"]
    names = row_names(able)
    cells = {(name, one.batch_size): one for name, one in zip(names, able, strict=True)}
    sizes = sorted({size for _, size in cells})
    precisions = list(dict.fromkeys(precision for precision, _ in cells))
    rows = [[cells.get((name, size)) for size in sizes] for name in precisions]
    speeds = [[one.samples_per_second if one else math.nan for one in row] for row in rows]
    labels = [[_label(one, line_break) if one else "" for one in row] for row in rows]
    return [str(size) for size in sizes], precisions, speeds, labels


def _label(one: ProbeResult, line_break: str) -> str:
    memory = [] if one.memory_bytes is None else [f"{one.memory_bytes / 2**30:.1f} GiB"]
    return line_break.join([f"{one.samples_per_second:,.0f}", *memory, one.bound])

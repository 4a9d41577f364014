"""Time against cost, and the scaling curve: by plotly and by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rankzero.tuning.next_trial import front
from rankzero.tuning.verdict.cost import DeviceResult, time_and_cost

_DOTS_PER_INCH = 120


class _Series(NamedTuple):
    name: str
    x: list[float]
    y: list[float]
    texts: list[str]
    """At each point."""
    is_line: bool = False
    spread: Sequence[float] = ()
    """The factors from each point to its interval's ends, in both directions; NaN: unknown."""

    def bars(self, values: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return the lengths of the error bars at some coordinates: below, and above."""
        known = [one if math.isfinite(one) else 1.0 for one in self.spread or [1.0] * len(values)]
        pairs = list(zip(values, known, strict=True))
        return [x - x / one for x, one in pairs], [x * one - x for x, one in pairs]


class _Chart(NamedTuple):
    name: str
    title: str
    axes: tuple[str, str]
    series: list[_Series]


def interactive(result: DeviceResult) -> list[Any]:
    """Return plotly figures of what is known."""
    import plotly.graph_objects as go

    figures = []
    for chart in _charts(result):
        titles = {f"{axis}axis_title": name for axis, name in zip("xy", chart.axes, strict=True)}
        figure = go.Figure(layout={"title": chart.title, **titles})
        for one in chart.series:
            bars = {
                f"error_{axis}": dict(zip(("arrayminus", "array"), one.bars(values), strict=True))
                for axis, values in (("x", one.x), ("y", one.y))
            }
            mode = "lines" if one.is_line else "markers+text"
            text = {"text": one.texts, "textposition": "top right"}
            figure.add_scatter(x=one.x, y=one.y, name=one.name, mode=mode, **text, **bars)
        figures.append(figure)
    return figures


def write_pngs(folder: Path, result: DeviceResult) -> None:
    """Write ``cost.png`` and ``scaling.png``, if they have something to show."""
    from matplotlib.figure import Figure

    for chart in _charts(result):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for one in chart.series:
            style = "-" if one.is_line else "o"
            bars: dict[str, Any] = {"xerr": one.bars(one.x), "yerr": one.bars(one.y)}
            axes.errorbar(one.x, one.y, fmt=style, label=one.name, capsize=3, **bars)
            for x, y, text in zip(one.x, one.y, one.texts, strict=False):
                axes.annotate(text, (x, y), xytext=(4, 4), textcoords="offset points")
        axes.set(title=chart.title, xlabel=chart.axes[0], ylabel=chart.axes[1])
        axes.legend()
        path = folder / f"{chart.name}.png"
        path.unlink(missing_ok=True)  # a planted link would be followed
        figure.savefig(path, dpi=_DOTS_PER_INCH)


def _charts(result: DeviceResult) -> list[_Chart]:
    charts = []
    if found := result.found:
        kept = front(found, time_and_cost)
        x, y = ([pair[place] for pair in map(time_and_cost, kept)] for place in (0, 1))
        series = [_Series("Pareto front", x, y, [], is_line=True)]
        for name, is_confirmed in (("confirmed, with 95 % intervals", True), ("trials", False)):
            shown = [one for one in found if bool(one.seeds) is is_confirmed]
            x, y = ([pair[place] for pair in map(time_and_cost, shown)] for place in (0, 1))
            texts = [f"{one.trial} on {one.devices}" for one in shown]
            series.append(_Series(name, x, y, texts, spread=[one.spread for one in shown]))
        axes = ("seconds to the target", "cost to the target (units of --price)")
        charts.append(_Chart("cost", "Time and cost to the target: trial on devices", axes, series))
    if curve := result.curve:
        series = []
        for name, predicted in (("measured", False), ("prediction", True)):
            points = [one for one in curve.points if one.is_predicted is predicted]
            counts, speeds = (
                [float(one.devices) for one in points],
                [one.samples_per_second for one in points],
            )
            texts = [f"{one.efficiency:.0%}" for one in points]
            series.append(_Series(name, counts, speeds, texts))
        last = curve.points[-1]
        ends = [1.0, float(last.devices)]
        ideal = last.samples_per_second / last.efficiency / last.devices
        series.append(
            _Series("100 % efficiency", ends, [ideal * one for one in ends], [], is_line=True)
        )
        title = f"Scaling of batch {curve.batch_size}: samples/s and efficiency"
        charts.append(_Chart("scaling", title, ("devices", "samples/s"), series))
    return charts

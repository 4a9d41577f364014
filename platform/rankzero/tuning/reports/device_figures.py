"""Time against cost, and the scaling curve: as figures of plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rankzero.tuning.next_trial import front
from rankzero.tuning.verdict.cost import DeviceResult, time_and_cost


def figures(result: DeviceResult) -> dict[str, Any]:
    """Return ``cost`` and ``scaling``, if they have something to show."""
    found = {}
    if priced := result.found:
        title = "Time and cost to the target: trial on devices"
        axes = ("seconds to the target", "cost to the target (units of --price)")
        best = [*map(time_and_cost, front(priced, time_and_cost))]
        cost = found["cost"] = _figure(title, axes)
        _add(cost, "Pareto front", best, mode="lines")
        for name, is_confirmed in (("confirmed, with 95 % intervals", True), ("trials", False)):
            shown = [one for one in priced if bool(one.seeds) is is_confirmed]
            texts = [f"{one.trial} on {one.devices}" for one in shown]
            points, spread = [*map(time_and_cost, shown)], [one.spread for one in shown]
            _add(cost, name, points, texts, spread)
    if curve := result.curve:
        title = f"Scaling of batch {curve.batch_size}: samples/s and efficiency"
        scaling = found["scaling"] = _figure(title, ("devices", "samples/s"))
        for name, predicted in (("measured", False), ("prediction", True)):
            known = [one for one in curve.points if one.is_predicted is predicted]
            points = [(one.devices, one.samples_per_second) for one in known]
            _add(scaling, name, points, [f"{one.efficiency:.0%}" for one in known])
        last = curve.points[-1]
        ideal = last.samples_per_second / last.efficiency / last.devices
        ends = [(count, ideal * count) for count in (1, last.devices)]
        _add(scaling, "100 % efficiency", ends, mode="lines")
    return found


def _figure(title: str, axes: tuple[str, str]) -> Any:
    import plotly.graph_objects as go

    return go.Figure(layout={"title": title, "xaxis_title": axes[0], "yaxis_title": axes[1]})


def _add(
    figure: Any,
    name: str,
    points: Sequence[tuple[float, float]],
    texts: Sequence[str] = (),
    spread: Sequence[float] = (),
    mode: str = "markers+text",
) -> None:
    """Add points, with a text at each, and bars to the ends of their intervals.

    `spread`: the factors from each point to the ends, in both directions; NaN: unknown.
    """
    known = [one if math.isfinite(one) else 1.0 for one in spread or [1.0] * len(points)]
    given: dict[str, Any] = {"text": texts, "textposition": "top right"}
    for axis, letter in enumerate("xy"):
        values = [point[axis] for point in points]
        pairs = list(zip(values, known, strict=True))
        below, above = [x - x / one for x, one in pairs], [x * one - x for x, one in pairs]
        given |= {letter: values, f"error_{letter}": {"arrayminus": below, "array": above}}
    figure.add_scatter(name=name, mode=mode, **given)

"""A search in pictures: one page that opens offline. Imports plotly when it is called. `pngs` draws the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankzero.experiment import Goal
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.space import BATCH_INDEX, FACTOR, PRECISION
from rankzero.tuning.trial import Trial

BLUE, GREY, GREEN, RED = "#1f77b4", "#b0b0b0", "#2ca02c", "#d62728"
COLOURS = {"COMPLETE": BLUE, "PRUNED": GREY, "FAIL": RED}
TERMS = {BATCH_INDEX: "batch size", FACTOR: "learning rate", PRECISION: "precision"}
Point = tuple[float, float, Trial]  # samples/s, quality


def page(
    trials: Sequence[Trial],
    measured: Sequence[ProbeResult],
    importances: Mapping[str, float],
    goal: Goal,
    region: Sequence[int],
    title: str,
) -> str:
    """Return an HTML page with every picture, interactive, with all that it needs inside."""
    figures = [
        pareto(trials, goal, region),
        history(trials),
        *([heat_map(measured)] if measured else []),
        *([importance(importances)] if importances else []),
        parallel(trials),
    ]
    return _html(figures, title)


def _html(figures: Sequence[Any], title: str) -> str:
    import plotly.io

    parts = [
        plotly.io.to_html(figure, full_html=False, include_plotlyjs=number == 0)
        for number, figure in enumerate(figures)
    ]
    style = "body{font-family:sans-serif;max-width:1100px;margin:1em auto}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_escaped(title)}</title>'
        f"<style>{style}</style></head><body><h2>{_escaped(title)}</h2>{''.join(parts)}</body></html>"
    )


def points(trials: Sequence[Trial]) -> list[Point]:
    """Return what both have: speed and quality."""
    return [
        (float(trial.facts["samples_per_second"]), float(trial.facts["best"]), trial)
        for trial in trials
        if "samples_per_second" in trial.facts and "best" in trial.facts
    ]


def by_state(found: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    """Return the points of each state that has any."""
    groups = [(state, [point for point in found if point[2].state == state]) for state in COLOURS]
    return [(state, some) for state, some in groups if some]


def front(found: Sequence[Point], goal: Goal) -> list[Point]:
    """Return the finished points that none beats in both speed and quality, by speed."""
    kept: list[Point] = []
    finished = [point for point in found if point[2].state == "COMPLETE"]
    for point in sorted(finished, key=lambda one: (-one[0], one[1])):
        if not kept or goal.better(point[1], kept[-1][1]):
            kept.append(point)
    return kept[::-1]


def pareto(trials: Sequence[Trial], goal: Goal, region: Sequence[int]) -> Any:
    """Return the picture of throughput x quality, the front and the sweet region marked."""
    import plotly.graph_objects as go

    found = points(trials)
    figure = go.Figure(
        layout={
            "title": "Throughput and quality",
            "xaxis_title": "samples/s",
            "yaxis_title": goal.metric,
        }
    )
    for state, some in by_state(found):
        colour = COLOURS[state]
        figure.add_scatter(
            x=[one[0] for one in some],
            y=[one[1] for one in some],
            mode="markers",
            name=state.lower(),
            marker={"color": colour, "size": 9},
            text=[said(one[2]) for one in some],
        )
    edge = front(found, goal)
    figure.add_scatter(
        x=[one[0] for one in edge],
        y=[one[1] for one in edge],
        mode="lines",
        name="Pareto front",
        line={"color": GREY, "dash": "dot"},
    )
    sweet = [point for point in found if point[2].number in set(region)]
    star = {"symbol": "star", "color": GREEN, "size": 16}
    figure.add_scatter(
        x=[one[0] for one in sweet],
        y=[one[1] for one in sweet],
        mode="markers",
        name="sweet region",
        marker=star,
        text=[said(one[2]) for one in sweet],
    )
    return figure


def history(trials: Sequence[Trial]) -> Any:
    """Return the picture of the objective by trial, and the best so far."""
    import plotly.graph_objects as go

    valued = [trial for trial in trials if trial.value is not None]
    figure = go.Figure(
        layout={
            "title": "Objective by trial",
            "xaxis_title": "trial",
            "yaxis_title": "value (less is better)",
        }
    )
    figure.add_scatter(
        x=[trial.number for trial in valued],
        y=[trial.value for trial in valued],
        mode="markers",
        name="trials",
        text=[said(trial) for trial in valued],
    )
    good = [trial for trial in valued if trial.feasible]
    best = [min(one.value or 0.0 for one in good[: count + 1]) for count in range(len(good))]
    figure.add_scatter(
        x=[trial.number for trial in good], y=best, name="best so far", line={"shape": "hv"}
    )
    return figure


def heat_map(measured: Sequence[ProbeResult]) -> Any:
    """Return the probe map as a picture: batch size x precision, samples/s."""
    import plotly.graph_objects as go

    sizes, precisions, cells = grid(measured)
    speed = [
        [cells[s, p].samples_per_second if (s, p) in cells else None for s in sizes]
        for p in precisions
    ]
    text = [[cell(cells.get((s, p))) for s in sizes] for p in precisions]
    layout = {
        "title": "Probe map: samples/s",
        "xaxis_title": "batch size",
        "xaxis_type": "category",
    }
    return go.Figure(
        go.Heatmap(
            z=speed,
            x=[str(s) for s in sizes],
            y=precisions,
            text=text,
            texttemplate="%{text}",
            colorscale="Viridis",
        ),
        layout=layout,
    )


def importance(importances: Mapping[str, float]) -> Any:
    """Return the picture of what matters."""
    import plotly.graph_objects as go

    names = sorted(importances, key=lambda name: importances[name])
    shown = [TERMS.get(name, name) for name in names]
    return go.Figure(
        go.Bar(x=[importances[name] for name in names], y=shown, orientation="h"),
        layout={"title": "Importance of what was searched (PED-ANOVA)"},
    )


def parallel(trials: Sequence[Trial]) -> Any:
    """Return the picture of configurations as lines, coloured by their value."""
    import plotly.graph_objects as go

    valued = [trial for trial in trials if trial.value is not None]
    rows = [configuration(trial) for trial in valued]
    dimensions = [
        _axis(name, [row.get(name) for row in rows]) for name in (rows[0] if rows else ())
    ]
    dimensions.append({"label": "value", "values": [trial.value for trial in valued]})
    line = {
        "color": [trial.value for trial in valued],
        "colorscale": "Viridis_r",
        "showscale": True,
    }
    return go.Figure(
        go.Parcoords(line=line, dimensions=dimensions), layout={"title": "Configurations"}
    )


def configuration(trial: Trial) -> dict[str, Any]:
    """Return what a trial tried, in the user's own terms."""
    ours = {name: trial.facts.get(name) for name in ("batch_size", "precision", "lr")}
    return {
        **ours,
        **{name: value for name, value in trial.parameters.items() if name not in TERMS},
    }


def map_page(measured: Sequence[ProbeResult], title: str) -> str:
    """Return an HTML page with the probe map alone."""
    return _html([heat_map(measured)], title)


def grid(
    measured: Sequence[ProbeResult],
) -> tuple[list[int], list[str], dict[tuple[int, str], ProbeResult]]:
    """Return the batch sizes, the precisions and the cells that were measured."""
    cells = {(one.batch_size, one.precision): one for one in measured if one.status == "ok"}
    return (
        sorted({size for size, _ in cells}),
        list(dict.fromkeys(name for _, name in cells)),
        cells,
    )


def cell(one: ProbeResult | None) -> str:
    """Return a cell in words, its lines parted as in HTML."""
    if one is None:
        return ""
    memory = "" if one.memory_bytes is None else f"<br>{one.memory_bytes / 2**30:.1f} GiB"
    return f"{one.samples_per_second:,.0f}{memory}<br>{one.bound}"


def _axis(name: str, values: Sequence[Any]) -> dict[str, Any]:
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return {"label": name, "values": list(values)}
    options = sorted({str(value) for value in values})
    return {
        "label": name,
        "values": [options.index(str(value)) for value in values],
        "tickvals": list(range(len(options))),
        "ticktext": options,
    }


def said(trial: Trial) -> str:
    """Return a trial in words."""
    what = ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in trial.parameters.items()
    )
    return f"trial {trial.number}: {what}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

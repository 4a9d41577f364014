"""A search in pictures that any viewer shows: PNGs. Imports matplotlib when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero.experiment import Goal
from rankzero.reporting.image_grids import plain_words
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.reports.html_page import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    TERMS,
    Point,
    by_state,
    cell,
    configuration,
    front,
    grid,
    points,
)
from rankzero.tuning.trial import Trial

DOTS_PER_INCH = 120
MOST_LABELS = 16  # on an axis


def write(
    folder: Path,
    trials: Sequence[Trial],
    measured: Sequence[ProbeResult],
    importances: Mapping[str, float],
    goal: Goal,
    region: Sequence[int],
) -> None:
    """Write a picture for each that there is something to show in: ``pareto.png``, ``history.png`` and so on."""
    _draw(folder / "pareto.png", lambda axes: _draw_pareto(axes, points(trials), goal, set(region)))
    _draw(folder / "history.png", lambda axes: _draw_history(axes, trials))
    if importances:
        _draw(folder / "importance.png", lambda axes: _draw_importance(axes, importances), (7, 3))
    if any(trial.value is not None for trial in trials):
        _draw(folder / "parallel.png", lambda axes: _draw_parallel(axes, trials), (9, 5))
    if measured:
        write_map(folder, measured)


def write_map(folder: Path, measured: Sequence[ProbeResult]) -> None:
    """Write ``probe_map.png``."""
    height = 1.6 + 0.6 * len({one.precision for one in measured})
    _draw(folder / "probe_map.png", lambda axes: _draw_heat_map(axes, measured), (9, height))


@plain_words
def _draw(path: Path, draw: Callable[[Any], None], inches: tuple[float, float] = (7, 5)) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")  # no pyplot: it keeps what it drew
    draw(figure.subplots())
    path.unlink(missing_ok=True)  # a link that somebody put there would be written through
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_pareto(axes: Any, found: Sequence[Point], goal: Goal, region: set[int]) -> None:
    for state, some in by_state(found):
        axes.scatter(
            [one[0] for one in some],
            [one[1] for one in some],
            color=COLOURS[state],
            label=state.lower(),
        )
    edge = front(found, goal)
    axes.plot(
        [one[0] for one in edge], [one[1] for one in edge], ":", color=GREY, label="Pareto front"
    )
    sweet = [point for point in found if point[2].number in region]
    axes.scatter(
        [one[0] for one in sweet],
        [one[1] for one in sweet],
        marker="*",
        s=260,
        color=GREEN,
        label="sweet region",
    )
    axes.set(xlabel="samples/s", ylabel=goal.metric, title="Throughput and quality")
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_heat_map(axes: Any, measured: Sequence[ProbeResult]) -> None:
    sizes, precisions, cells = grid(measured)
    nothing = float("nan")
    speed = [
        [cells[s, p].samples_per_second if (s, p) in cells else nothing for s in sizes]
        for p in precisions
    ]
    axes.imshow(speed, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_yticks(range(len(precisions)), precisions)
    axes.set(xlabel="batch size", title="Probe map: samples/s, and what limits it")
    for row, precision in enumerate(precisions):
        for column, size in enumerate(sizes):
            text = cell(cells.get((size, precision))).replace("<br>", "\n")
            axes.text(column, row, text, ha="center", va="center", color="white", fontsize=7)


def _draw_history(axes: Any, trials: Sequence[Trial]) -> None:
    valued = [trial for trial in trials if trial.value is not None]
    axes.scatter(
        [trial.number for trial in valued],
        [trial.value for trial in valued],
        color=BLUE,
        label="trials",
    )
    good = [trial for trial in valued if trial.feasible]
    best = [min(one.value or 0.0 for one in good[: count + 1]) for count in range(len(good))]
    axes.step(
        [trial.number for trial in good], best, where="post", color=GREEN, label="best so far"
    )
    axes.set(xlabel="trial", ylabel="value (less is better)", title="Objective by trial")
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_importance(axes: Any, importances: Mapping[str, float]) -> None:
    names = sorted(importances, key=lambda name: importances[name])
    axes.barh(
        [TERMS.get(name, name) for name in names], [importances[name] for name in names], color=BLUE
    )
    axes.set(title="Importance of what was searched (PED-ANOVA)")


def _draw_parallel(axes: Any, trials: Sequence[Trial]) -> None:
    """Draw each configuration as a line over axes of their own scales, the better the darker."""
    valued = sorted(
        (trial for trial in trials if trial.value is not None),
        key=lambda trial: -(trial.value or 0.0),
    )
    rows = [{**configuration(trial), "value": trial.value} for trial in valued]
    names = list(rows[0])
    columns = {name: _ranks([row[name] for row in rows]) for name in names}
    for number in range(len(rows)):
        shade = (number + 1) / len(rows)
        axes.plot(
            [columns[name][number] for name in names], color=BLUE, alpha=0.15 + 0.85 * shade**2
        )
    for position, name in enumerate(names):
        for value in sorted({row[name] for row in rows}, key=str)[:MOST_LABELS]:
            height = columns[name][[row[name] for row in rows].index(value)]
            label = f"{value:.3g}" if isinstance(value, float) else str(value)
            axes.annotate(
                label, (position, height), xytext=(4, 2), textcoords="offset points", fontsize=7
            )
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks([])
    axes.set(
        title="Configurations: each axis from its least to its greatest, the best line the darkest"
    )
    axes.grid(axis="x", alpha=0.3)


def _ranks(values: Sequence[Any]) -> list[float]:
    """Return where each value lies among those that occur: 0 the least, 1 the greatest."""
    order = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    return [order.index(value) / max(1, len(order) - 1) for value in values]

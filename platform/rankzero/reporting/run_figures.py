"""Pictures of a whole run: learning curves, and where the time of its steps went. Import matplotlib when called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankzero.events import RunStarted
from rankzero.faults import is_want
from rankzero.metric_names import DATA_WAIT, STEP_SECONDS
from rankzero.reporting.image_grids import DOTS_PER_INCH, GREY, INK, headings, plain_words
from rankzero.reporting.run_facts import goal_of

if TYPE_CHECKING:
    from pandas import DataFrame

    from rankzero.reporting.metric_table import Cell
    from rankzero.run_store.folder import RunFolder

COLOURS = {
    "forward": "#1f77b4",
    "backward": "#6baed6",
    "optimizer": "#9ecae1",
    "communication": "#e6862c",
    "data": "#d62728",
    "other": "#b0b0b0",
}
MOST_POINTS = 4000  # of a curve: more than a picture has columns
NARROW = 0.05  # of the bar: a part that has no room for words


def draw(folder: RunFolder, into: Path) -> tuple[list[Path], dict[str, Exception]]:
    """Draw a run's figures into the folder `into`; none for a run without steps, or without curves of its own.

    Returns them, and by name what went wrong with others. Raises what the machine lacks: space, memory, files.
    """
    from rankzero.reporting import metric_table
    from rankzero.run_store.journal import read_all

    events = read_all(folder.events)
    start = next((event for event in events if isinstance(event, RunStarted)), None)
    goal = goal_of(start.params) if start else None
    metric = goal.metric if goal else ""
    table = metric_table.table(thinned(shown(metric_table.cells(events), metric)))
    found, failed = [], {}
    for name, write in (("learning_curves", _write_curves), ("step_time", _write_steps)):
        try:
            if write(into / f"{name}.png", table, metric):
                found.append(into / f"{name}.png")
        except Exception as error:  # whatever a user's values do to matplotlib
            if is_want(error):
                raise
            failed[name] = error
    return found, failed


def _write_curves(path: Path, table: DataFrame, goal: str) -> bool:
    columns = [name for name in table.columns if name not in (STEP_SECONDS, DATA_WAIT)]
    return len(table) > 1 and write(path, table[columns], goal)


def _write_steps(path: Path, table: DataFrame, goal: str) -> bool:
    if (
        not {STEP_SECONDS, DATA_WAIT} <= set(table.columns)
        or len(table[[STEP_SECONDS, DATA_WAIT]].dropna()) < 2
    ):
        return False
    write_steps(path, table)
    return True


def shown(cells: Iterable[Cell], goal: str) -> Iterator[Cell]:
    """Yield the values that a figure shows: of more curves than have a frame, the goal's, the loss and the first."""
    titles = {"loss", goal.partition("/")[2]}
    for cell in cells:
        place, _, title = cell[0].partition("/")
        if place in PLACES and (title in titles or len(titles) < 2 + MOST_FRAMES):
            titles.add(title)
            yield cell
        elif cell[0] in (STEP_SECONDS, DATA_WAIT):
            yield cell


def thinned(cells: Iterable[Cell]) -> Iterator[Cell]:
    """Yield at most twice `MOST_POINTS` of each metric, evenly spaced, the last among them. Holds no more."""
    kept: dict[str, list[Cell]] = {}
    stride: dict[str, int] = {}
    count: dict[str, int] = {}
    last: dict[str, Cell] = {}
    for cell in cells:
        name = cell[0]
        last[name] = cell
        count[name] = count.get(name, -1) + 1
        if count[name] % stride.setdefault(name, 1):
            continue
        column = kept.setdefault(name, [])
        column.append(cell)
        if len(column) >= 2 * MOST_POINTS:
            del column[1::2]
            stride[name] *= 2
    for name, column in kept.items():
        yield from column
        if column[-1] is not last[name]:
            yield last[name]


@plain_words
def write_steps(path: Path, table: DataFrame) -> None:
    """Draw a run's step time over its steps, in the two parts that are measured: waiting for data, and the rest."""
    from matplotlib.figure import Figure

    known = table[["step", STEP_SECONDS, DATA_WAIT]].dropna()
    whole = 1e3 * known[STEP_SECONDS]
    waiting = whole * known[DATA_WAIT].clip(0, 1)
    figure = Figure(figsize=(9, 3.9), layout="constrained", facecolor="white")
    axes = figure.subplots()
    labels = ["waiting for data", "forward, backward, communication, optimizer"]
    axes.stackplot(
        known["step"],
        waiting,
        whole - waiting,
        labels=labels,
        step="pre",
        alpha=0.85,
        colors=[COLOURS["data"], COLOURS["forward"]],
    )
    top = (
        float(min(whole.quantile(0.98), 3 * whole.median())) * 1.35
    )  # warming up would flatten all that comes after
    axes.set(
        xlabel="step",
        ylabel="milliseconds a step",
        ylim=(0, top or 1),
        xlim=(known["step"].min(), known["step"].max()),
    )
    share = float(waiting.sum() / max(whole.sum(), 1e-12))
    says = f"median {whole.median():.3g} ms · {share:.0%} waiting for data · the slowest rank's"
    headings(figure, 3.9, "Step time", says)
    axes.legend(loc="upper right", ncols=2, frameon=False, reverse=True)
    _plain(axes)
    figure.savefig(path, dpi=DOTS_PER_INCH)


@plain_words
def write_bar(path: Path, parts: Mapping[str, float], title: str) -> None:
    """Draw the parts of a step, in seconds by name, as one bar; the words below it where there is no room inside."""
    from matplotlib.figure import Figure

    whole = sum(parts.values()) or 1.0
    figure = Figure(figsize=(9, 2.7), layout="constrained", facecolor="white")
    axes = figure.subplots()
    left = 0.0
    for name, seconds in parts.items():
        share = seconds / whole
        axes.barh(
            0,
            1e3 * seconds,
            left=1e3 * left,
            color=COLOURS.get(name, GREY),
            label=f"{name} {share:.0%}",
            height=0.6,
        )
        if share >= NARROW:
            dark = name in ("forward", "data")
            axes.text(
                1e3 * (left + seconds / 2),
                0,
                f"{share:.0%}",
                ha="center",
                va="center",
                color="white" if dark else INK,
                fontsize=9,
            )
        left += seconds
    headings(
        figure,
        2.7,
        title,
        "where its time goes, by the profiler; communication: what no computing hides",
    )
    axes.set(xlabel="milliseconds", xlim=(0, 1e3 * whole), ylim=(-0.4, 0.4))
    axes.set_yticks([])
    figure.legend(
        loc="outside lower center",
        ncols=len(parts),
        frameon=False,
        handlelength=1,
        columnspacing=1.4,
    )
    _plain(axes)
    axes.spines["left"].set_visible(False)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


PLACES = ("train", "val")


MOST_FRAMES = 12
COLUMNS = 2


@plain_words
def write(path: Path, table: DataFrame, goal: str = "") -> bool:
    """Draw the curves of a table of metrics into a PNG, the goal's metric first; return whether there are any."""
    from matplotlib.figure import Figure

    groups = grouped([str(name) for name in table.columns[2:]], goal)
    if not groups:
        return False
    rows = -(-len(groups) // COLUMNS)
    figure = Figure(figsize=(6.0 * min(COLUMNS, len(groups)), 3.6 * rows), layout="constrained")
    frames = figure.subplots(rows, min(COLUMNS, len(groups)), squeeze=False).flat
    for frame, (title, names) in zip(frames, groups.items(), strict=False):
        _draw(frame, table, title, names)
    for frame in list(frames):
        frame.set_visible(False)
    figure.savefig(path, dpi=120)
    return True


def grouped(names: Sequence[str], goal: str = "") -> dict[str, list[str]]:
    """Return the metrics that share a frame, by its title: ``loss`` for train/loss and val/loss. Pure."""
    last = {name: name.partition("/")[2] for name in names if name.partition("/")[0] in PLACES}
    titles = dict.fromkeys(
        sorted(last.values(), key=lambda title: (f"val/{title}" != goal, title != "loss"))
    )
    groups = {title: [name for name in names if last.get(name) == title] for title in titles}
    others = {name: [name] for name in names if name not in last}
    return dict(list({**groups, **others}.items())[:MOST_FRAMES])


def _draw(frame: Any, table: DataFrame, title: str, names: Sequence[str]) -> None:
    for name in names:
        known = table[["step", name]].dropna()
        sparse = len(known) < 50
        frame.plot(
            known["step"],
            known[name],
            "o-" if sparse else "-",
            label=name,
            markersize=3,
            linewidth=1.2,
        )
    frame.set(title=title, xlabel="step")
    frame.grid(alpha=0.3)
    if len(names) > 1:
        frame.legend()

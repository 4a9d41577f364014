"""Learning curves as a picture: one frame for train/loss and val/loss. Imports matplotlib when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankzero.tracking.drawing import plain_words

if TYPE_CHECKING:
    from pandas import DataFrame

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
    titles = dict.fromkeys(sorted(last.values(), key=lambda title: (f"val/{title}" != goal, title != "loss")))
    groups = {title: [name for name in names if last.get(name) == title] for title in titles}
    others = {name: [name] for name in names if name not in last}
    return dict(list({**groups, **others}.items())[:MOST_FRAMES])


def _draw(frame: Any, table: DataFrame, title: str, names: Sequence[str]) -> None:
    for name in names:
        known = table[["step", name]].dropna()
        sparse = len(known) < 50
        frame.plot(known["step"], known[name], "o-" if sparse else "-", label=name, markersize=3, linewidth=1.2)
    frame.set(title=title, xlabel="step")
    frame.grid(alpha=0.3)
    if len(names) > 1:
        frame.legend()

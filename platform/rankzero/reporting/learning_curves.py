"""The learning curves of a run as a PNG, for ``rankzero export``. Imports matplotlib if called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankzero.reporting.image_grids import canvas, plain_words

if TYPE_CHECKING:
    from pandas import DataFrame

_MAX_FRAMES = 12
_COLUMNS = 2


@plain_words()
def write(path: Path, table: DataFrame, goal: str = "") -> bool:
    """Draw the curves of a table of metrics, the goal metric first; return whether there are any.

    ``train/loss`` and ``val/loss`` share a frame.
    """
    # The first two columns are the step and its time.
    groups = grouped([str(name) for name in table.columns[2:]], goal)
    if not groups:
        return False
    columns = min(_COLUMNS, len(groups))
    rows = -(-len(groups) // _COLUMNS)
    figure = canvas(6.0 * columns, 3.6 * rows)
    frames = list(figure.subplots(rows, columns, squeeze=False).flat)
    for frame, (title, names) in zip(frames, groups.items(), strict=False):
        for name in names:
            # Metrics have different steps. A gap must not break the line.
            known = table[["step", name]].dropna()
            # Dots show where the few values are.
            style = "o-" if len(known) < 50 else "-"
            frame.plot(known["step"], known[name], style, label=name, markersize=3, linewidth=1.2)
        frame.set(title=title, xlabel="step")
        frame.grid(alpha=0.3)
        if len(names) > 1:
            frame.legend()
    for frame in frames[len(groups) :]:
        frame.set_visible(False)
    figure.savefig(path, dpi=120)
    return True


def grouped(names: Sequence[str], goal: str = "") -> dict[str, list[str]]:
    """Return the metrics of each frame by its title: ``loss`` for train/loss and val/loss."""
    titles: dict[str, list[str]] = {}
    for name in names:
        place, _, rest = name.partition("/")
        titles.setdefault(rest if place in ("train", "val", "test") else name, []).append(name)
    # Metrics of the training or the validation come first, the goal before the loss.
    shared = {name.partition("/")[2] for name in names if name.startswith(("train/", "val/"))}
    order = sorted(
        titles, key=lambda title: (title not in shared, f"val/{title}" != goal, title != "loss")
    )
    return {title: titles[title] for title in order[:_MAX_FRAMES]}

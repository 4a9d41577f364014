"""The scaling picture: speed-up against devices, with the ideal line. Imports matplotlib when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankzero.compare.entries import Row


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Write ``scaling.png``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    known = [row for row in rows if row.speed_up is not None]
    most = max((row.measured.entry.devices for row in known), default=1)
    axes.plot([1, most], [1, most], ":", color="grey", label="ideal")
    for name in dict.fromkeys(row.measured.entry.strategy for row in known):
        some = [row for row in known if row.measured.entry.strategy == name]
        axes.plot([row.measured.entry.devices for row in some], [row.speed_up or 0.0 for row in some], "o-", label=name)
    axes.set(xlabel="devices", ylabel="speed-up", title="The same work on more devices")
    axes.set_xticks(sorted({row.measured.entry.devices for row in known} or {1}))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(folder / "scaling.png", dpi=120)

"""Comparisons and profiles as PNGs. Imports matplotlib when it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankzero.compare.results import StrategyResult
from rankzero.reporting.image_grids import DOTS_PER_INCH, GREY, INK, canvas, headings, plain_words
from rankzero.training.profiling.profiler import Profile

_COLOURS = {
    "forward": "#1f77b4",
    "backward": "#6baed6",
    "optimizer": "#9ecae1",
    "communication": "#e6862c",
    "data": "#d62728",
    "other": "#b0b0b0",
}
_NARROW = 0.05  # the share of a part that has no room for words


@plain_words()
def write_scaling(folder: Path, rows: Sequence[StrategyResult]) -> None:
    """Write ``scaling.png``: the speed-up by the number of devices, if there are several."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.speed_up is not None:
            points.setdefault(row.run.strategy, []).append((row.run.devices, row.speed_up))
    devices = sorted({count for found in points.values() for count, _ in found})
    if len(devices) < 2:
        return
    figure = canvas(7, 5)
    axes = figure.subplots()
    # Twice the devices of the base, the first row, are twice as fast.
    base = next(row.run.devices for row in rows if row.speed_up is not None)
    ends = (devices[0], devices[-1])
    axes.plot(ends, [count / base for count in ends], ":", color="grey", label="ideal")
    for name, found in points.items():
        axes.plot([x for x, _ in found], [y for _, y in found], "o-", label=name)
    axes.set(xlabel="devices", ylabel="speed-up", title="The same work on more devices")
    axes.set_xticks(devices)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(folder / "scaling.png", dpi=120)


@plain_words()
def write_step(path: Path, profile: Profile) -> None:
    """Draw the parts of a step's time as one bar."""
    whole, shares = 1e3 * profile.step_seconds, dataclasses.asdict(profile.breakdown)
    figure = canvas(9, 2.7)
    axes = figure.subplots()
    left = 0.0
    for name, share in shares.items():
        width = share * whole
        label = f"{name} {share:.0%}"
        axes.barh(0, width, left=left, color=_COLOURS.get(name, GREY), label=label, height=0.6)
        if share >= _NARROW:
            # White cannot be read on the lighter colours.
            colour = "white" if name in ("forward", "data") else INK
            style: dict[str, Any] = {"ha": "center", "va": "center", "color": colour}
            axes.text(left + width / 2, 0, f"{share:.0%}", fontsize=9, **style)
        left += width
    subtitle = "its time by the profiler; communication: what no computing hides"
    headings(figure, 2.7, f"A step of {whole:.3g} ms on {profile.device}", subtitle)
    # A step of a fast device may round to 0 ms, and an axis needs a width.
    axes.set(xlabel="milliseconds", xlim=(0, whole or 1.0), ylim=(-0.4, 0.4))
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(shares), frameon=False, handlelength=1)
    figure.savefig(path, dpi=DOTS_PER_INCH)

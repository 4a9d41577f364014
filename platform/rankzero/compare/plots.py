"""Comparisons and profiles as PNGs. Imports matplotlib when it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rankzero.compare.results import StrategyRow
from rankzero.reporting import run_figures
from rankzero.reporting.image_grids import plain_words
from rankzero.training.profiling.profiler import Profile


@plain_words
def write_scaling(folder: Path, rows: Sequence[StrategyRow]) -> None:
    """Write ``scaling.png``: the speed-up by the number of devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    points: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.speed_up is not None:
            run = row.result.run
            points.setdefault(run.strategy, []).append((run.devices, row.speed_up))
    devices = sorted({count for found in points.values() for count, _ in found} or {1})
    # The diagonal: n devices are n times as fast.
    axes.plot([1, devices[-1]], [1, devices[-1]], ":", color="grey", label="ideal")
    for name, found in points.items():
        axes.plot([x for x, _ in found], [y for _, y in found], "o-", label=name)
    axes.set(xlabel="devices", ylabel="speed-up", title="The same work on more devices")
    axes.set_xticks(devices)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(folder / "scaling.png", dpi=120)


def write_step(path: Path, profile: Profile) -> None:
    """Draw the parts of a step's time."""
    shares = dataclasses.asdict(profile.breakdown)
    parts = {name: share * profile.step_seconds for name, share in shares.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"A step of {1e3 * profile.step_seconds:.3g} ms on {profile.device}"
    run_figures.write_bar(path, parts, title)

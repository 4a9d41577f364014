"""Comparisons and profiles as pictures: speed-up against devices, a step's time. Import matplotlib when called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rankzero.compare.results import StrategyRow
from rankzero.reporting import run_figures
from rankzero.reporting.image_grids import plain_words
from rankzero.training.profiling.profiler import Profile


@plain_words
def write(folder: Path, rows: Sequence[StrategyRow]) -> None:
    """Write ``scaling.png``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    known = [row for row in rows if row.speed_up is not None]
    most = max((row.measured.entry.devices for row in known), default=1)
    axes.plot([1, most], [1, most], ":", color="grey", label="ideal")
    for name in dict.fromkeys(row.measured.entry.strategy for row in known):
        some = [row for row in known if row.measured.entry.strategy == name]
        axes.plot(
            [row.measured.entry.devices for row in some],
            [row.speed_up or 0.0 for row in some],
            "o-",
            label=name,
        )
    axes.set(xlabel="devices", ylabel="speed-up", title="The same work on more devices")
    axes.set_xticks(sorted({row.measured.entry.devices for row in known} or {1}))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(folder / "scaling.png", dpi=120)


def write_step(path: Path, profile: Profile) -> None:
    """Draw where a step's time goes."""
    shares = dataclasses.asdict(profile.breakdown)
    parts = {name: share * profile.step_seconds for name, share in shares.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    run_figures.write_bar(
        path, parts, f"A step of {1e3 * profile.step_seconds:.3g} ms on {profile.device}"
    )

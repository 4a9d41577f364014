"""``rankzero probe EXP [key=value…]``: measure speed and memory, and what knobs of speed do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.text import Text

from rankzero.cli.commands import search
from rankzero.cli.display import delivery_notes
from rankzero.cli.display.live import look
from rankzero.cli.display.terminal import print_line, print_table
from rankzero.reporting import html_page
from rankzero.scalars import shown
from rankzero.tuning.probe import grid, probe_map, speed_knobs
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.probe.scaling import SCALING_COLUMNS, scaling
from rankzero.tuning.probe.speed_knobs import EFFECT_COLUMNS, Effect
from rankzero.tuning.reports import png_files, probe_figures
from rankzero.tuning.space import settings_text

_SHADES = ("grey30", "dark_red", "orange4", "gold3", "chartreuse4", "green3")  # slow to fast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    search.add_experiment_arguments(parser, probes=True)


def run(arguments: argparse.Namespace) -> int:
    with search.stoppable(arguments), search.host(arguments) as host:
        described, space = search.described_space(arguments, host)
        identity = search.study_identity(arguments, space, "probe")
        file = identity.experiment_file or ""
        with search.open_run(arguments, identity, space.reference) as study_run:
            probe = probe_map.measure(
                space,
                described,
                file,
                arguments.dir,
                host,
                print_line,
                arguments.silence_seconds,
            )
            measured, effects = probe.cells, probe.effects
            figures = probe_figures.figures(measured, effects)
            study_run.write_probe(measured, effects)
            study_run.write("probe_map.html", html_page.page("Probe map", [*figures.values()]))
            png_files.write_all(study_run.folder.artifacts, figures)
            peak = max(one.samples_per_second for one in measured)
            text = f"{_knee(measured, effects)}, {shown(peak)} samples/s"
            curve = scaling(measured)
            text += f". {curve.sentence()}" if curve else ""
            study_run.finish(text, {"samples_per_second": peak})
    _print_map(measured, peak)
    if curve:
        print_table("scaling", SCALING_COLUMNS, [point.row for point in curve.points])
        print_line(curve.sentence())
    if effects:
        rows = [
            [Text(cell, "green" if one.decision == "kept" else "") for cell in one.row()]
            for one in effects
        ]
        print_table("knobs of speed, at the knee", EFFECT_COLUMNS, rows)
    delivery_notes.print_delivery(study_run.folder, offline=arguments.offline)
    print_line(f"look:  {look(study_run.folder)}")
    return delivery_notes.exit_code(study_run.folder)


def _knee(measured: Sequence[ProbeResult], effects: Sequence[Effect]) -> str:
    knee, speed = grid.knee(measured), speed_knobs.decided(effects)
    text = "no cell fits"
    if knee is not None:
        text = f"{knee.batch_size} samples a batch reach 95 % of the peak speed"
    return text + (f"; faster with {settings_text(speed)}" if speed else "")


def _print_map(measured: Sequence[ProbeResult], peak: float) -> None:
    """Print a row for each batch size and a column for each precision. Brighter is faster."""
    names = grid.row_names(measured)
    precisions = list(dict.fromkeys(names))
    cells = {(one.batch_size, name): one for one, name in zip(measured, names, strict=True)}
    rows = [
        [Text(str(size)), *(_cell(cells.get((size, precision)), peak) for precision in precisions)]
        for size in sorted({one.batch_size for one in measured})
    ]
    print_table("samples/s, memory, what limits it", ["batch", *precisions], rows)


def _cell(one: ProbeResult | None, peak: float) -> Text:
    if one is None:
        return Text("")
    if one.status != "ok":
        return Text(one.status, style="red")
    memory = "" if one.memory_bytes is None else f"  {one.memory_bytes / 2**30:.1f} GiB"
    shade = _SHADES[min(len(_SHADES) - 1, int(len(_SHADES) * one.samples_per_second / peak))]
    text = f"{shown(one.samples_per_second)} ± {one.relative_half_width:.1%}{memory}  {one.bound}"
    return Text(text, style=f"white on {shade}")

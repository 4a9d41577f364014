"""``rankzero probe EXP [key=value…]``: how fast, how much memory, batch size x precision."""

from __future__ import annotations

import argparse
import sys

from rich.table import Table
from rich.text import Text

from rankzero.cli.commands import search
from rankzero.cli.display.terminal import text_console
from rankzero.mlflow_store import uris
from rankzero.tuning import search as hunt
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.trials.host_process import Host

SHADES = ("grey30", "dark_red", "orange4", "gold3", "chartreuse4", "green3")  # slow to fast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    search.add_experiment_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    host = Host(search.libraries(arguments))
    try:
        described, space = search.look(arguments, host)
        identity = search.identity_of(arguments, space.reference, described.processes, "probe")
        if not arguments.offline:
            uris.prepare_store(identity.tracking_uri)
        measured = hunt.probe_alone(
            identity,
            arguments.dir,
            space,
            described,
            host,
            sys.argv,
            search.say,
            offline=arguments.offline,
        )
    finally:
        host.close()
    show(measured)
    return 0


def show(measured: list[ProbeResult]) -> None:
    """Print the map: a row for each batch size, a column for each precision, brighter is faster."""
    precisions = list(dict.fromkeys(one.precision for one in measured))
    peak = max(one.samples_per_second for one in measured)
    cells = {(one.batch_size, one.precision): one for one in measured}
    table = Table(
        "batch", *precisions, title="samples/s, memory, what limits it", title_justify="left"
    )
    for batch_size in sorted({one.batch_size for one in measured}):
        row = [_cell(cells.get((batch_size, precision)), peak) for precision in precisions]
        table.add_row(str(batch_size), *row)
    text_console().print(table)


def _cell(one: ProbeResult | None, peak: float) -> Text:
    if one is None:
        return Text("")
    if one.status != "ok":
        return Text(one.status, style="red")
    memory = "" if one.memory_bytes is None else f"  {one.memory_bytes / 2**30:.1f} GiB"
    shade = SHADES[min(len(SHADES) - 1, int(len(SHADES) * one.samples_per_second / peak))]
    text = f"{one.samples_per_second:,.0f} ± {one.relative_half_width:.1%}{memory}  {one.bound}"
    return Text(text, style=f"white on {shade}")

"""Comparisons and profiles as tables and sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rankzero.compare.results import StrategyResult
from rankzero.reporting.markdown import inline
from rankzero.reporting.markdown import table as table_in_markdown
from rankzero.scalars import shown
from rankzero.training.profiling.profiler import Profile

COLUMNS = (
    "strategy",
    "devices",
    "time",
    "samples/s",
    "speed-up",
    "efficiency",
    "memory",
    "GPU",
    "samples/J",
    "limited by",
)
_ADVICE = {
    "compute": "so compute faster: train.precision=bf16, train.compile=true",
    "communication": "so send less, or less often: a larger batch, accumulation "
    "(train.micro_batch), train.ddp.compression=bf16",
    "data": "so load faster: more processes (train.workers), or a data set in memory",
    "other": "so give the device more at once: a larger batch, train.compile=true",
}


def cells(one: StrategyResult) -> list[str]:
    """Return a row of the table with `COLUMNS`."""
    if one.reason:
        return [one.run.strategy, str(one.run.devices), "not run", *[""] * (len(COLUMNS) - 3)]
    margin = "" if one.half_width is None else f" ± {one.half_width / one.samples_per_second:.1%}"
    limit = ""
    if (found := one.breakdown) is not None:
        limit = f"{found.bound} {getattr(found, found.bound):.0%}"
    return [
        one.run.strategy,
        str(one.run.devices),
        f"{one.seconds:.3g} s",
        f"{shown(one.samples_per_second)}{margin}",
        "" if one.speed_up is None else f"{one.speed_up:.2f}x",
        "" if one.efficiency is None else f"{one.efficiency:.0%}",
        "" if one.memory_megabytes is None else f"{one.memory_megabytes:,.0f} MB",
        "" if one.gpu_percent is None else f"{one.gpu_percent:.0f} %",
        "" if one.samples_per_joule is None else f"{one.samples_per_joule:.3g}",
        limit,
    ]


def table(rows: Sequence[StrategyResult]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table, without columns that are empty."""
    lines = [cells(row) for row in rows]
    # A machine without GPUs measures neither their memory nor their energy.
    filled = [number for number in range(len(COLUMNS)) if any(line[number] for line in lines)]
    body = [[line[number] for number in filled] for line in lines]
    return [COLUMNS[number] for number in filled], body


def reasons(rows: Sequence[StrategyResult]) -> list[str]:
    """Return why some strategies were not run."""
    return [f"{row.run.name}: {row.reason}" for row in rows if row.reason]


def markdown(rows: Sequence[StrategyResult], notes: Sequence[str]) -> str:
    """Return the table, the strategies that were not run and the warnings, as Markdown."""
    head, body = table(rows)
    not_run = [f"Not run: {inline(reason)}" for reason in reasons(rows)]
    unfair = [f"**Not fair:** {note}" for note in notes]
    return "\n\n".join([table_in_markdown(head, body), *not_run, *unfair])


def sentence(rows: Sequence[StrategyResult]) -> str:
    """Return the comparison as a sentence."""
    known = [row for row in rows if row.speed_up is not None]
    if not known:
        return "Nothing could be measured."
    best = max(known, key=lambda row: row.speed_up or 0.0)
    # The first row is the base of the speed-ups, so a comparison with itself is left out.
    if best is known[0]:
        return f"Nothing is faster than {_where(best)}: {shown(best.samples_per_second)} samples/s."
    gain = f"{best.speed_up:.2f}x {_where(known[0])} ({best.efficiency:.0%} of ideal)"
    low = best.samples_per_second - (best.half_width or 0.0)
    alike = [row for row in known if row.samples_per_second + (row.half_width or 0.0) >= low]
    also = ", ".join(_where(row) for row in alike if row is not best)
    gain += f"; as fast within the intervals: {also}" if also else ""
    return f"Fastest: {_where(best)} with {shown(best.samples_per_second)} samples/s, {gain}."


def verdict(profile: Profile) -> str:
    """Return a profile as a paragraph."""
    found, step = profile.breakdown, profile.step_seconds
    return (
        f"A step takes {1e3 * step:.3g} ms ({shown(profile.batch_size / step)} samples/s): "
        f"{found.compute:.0%} compute ({found.forward:.0%} forward, {found.backward:.0%} backward, "
        f"{found.optimizer:.0%} optimizer), {found.communication:.0%} communication that no "
        f"computing hides, {found.data:.0%} waiting for data, {found.other:.0%} other (Python, "
        f"launching, waiting for another rank). The limit is {found.bound}, "
        f"{_ADVICE[found.bound]}. (Under the profiler a step took "
        f"{1e3 * profile.profiled_seconds:.3g} ms.)"
    )


def costs(profile: Profile) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of the most expensive operators."""
    rows = [
        [cost.name, f"{cost.milliseconds:.3g}", f"{cost.share:.0%}", f"{cost.calls:.3g}"]
        for cost in profile.costs
    ]
    return ["operator", "ms a profiled step", "share", "calls a step"], rows


def costs_in_markdown(profile: Profile) -> str:
    """Return the same table as Markdown, in which ``_`` would be emphasis."""
    head, rows = costs(profile)
    return table_in_markdown(head, [[f"`{inline(name)}`", *rest] for name, *rest in rows])


def _where(one: StrategyResult) -> str:
    plural = "s" if one.run.devices > 1 else ""
    return f"{one.run.strategy} on {one.run.devices} device{plural}"

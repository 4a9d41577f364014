"""Comparisons and profiles in words and tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rankzero.compare.results import StrategyResult, StrategyRow
from rankzero.training.profiling.profiler import Profile
from rankzero.training.profiling.spans import StepBreakdown

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
ADVICE = {
    "compute": "which is what one hopes for: train.precision=bf16 and train.compile=true make it less.",
    "communication": "so send less often or less: a larger batch, accumulation (train.micro_batch), "
    "train.ddp.compression=bf16.",
    "data": "so load faster: more processes (train.workers), or a data set that is kept in memory.",
    "other": "so give the device more at once: a larger batch, train.compile=true.",
}


def cells(row: StrategyRow) -> list[str]:
    """Return a row of the table, by `COLUMNS`."""
    one = row.measured
    if one.reason:
        return [one.entry.strategy, str(one.entry.devices), "not run", *[""] * (len(COLUMNS) - 3)]
    margin = "" if one.half_width is None else f" ± {one.half_width / one.samples_per_second:.1%}"
    return [
        one.entry.strategy,
        str(one.entry.devices),
        f"{one.seconds:.3g} s",
        f"{one.samples_per_second:,.0f}{margin}",
        "" if row.speed_up is None else f"{row.speed_up:.2f}x",
        "" if row.efficiency is None else f"{row.efficiency:.0%}",
        "" if one.memory_megabytes is None else f"{one.memory_megabytes:,.0f} MB",
        "" if one.gpu_percent is None else f"{one.gpu_percent:.0f} %",
        "" if one.samples_per_joule is None else f"{one.samples_per_joule:.3g}",
        "" if one.breakdown is None else f"{one.breakdown.bound} {_share(one.breakdown)}",
    ]


def table(rows: Sequence[StrategyRow]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table, without columns in which nothing was measured."""
    whole = [cells(row) for row in rows]
    kept = [number for number in range(len(COLUMNS)) if any(line[number] for line in whole)]
    return [COLUMNS[number] for number in kept], [
        [line[number] for number in kept] for line in whole
    ]


def reasons(rows: Sequence[StrategyRow]) -> list[str]:
    """Return why what was not run was not."""
    return [
        f"{row.measured.entry.name}: {row.measured.reason}" for row in rows if row.measured.reason
    ]


def markdown(rows: Sequence[StrategyRow], notes: Sequence[str]) -> str:
    """Return the table, what was not run and the warnings, for a run's page."""
    head, body = table(rows)
    lines = [head, ["---"] * len(head), *body]
    shown = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join(
        [
            shown,
            *(f"Not run: {reason}" for reason in reasons(rows)),
            *(f"**Not fair:** {note}" for note in notes),
        ]
    )


def sentence(rows: Sequence[StrategyRow]) -> str:
    """Return the comparison in a sentence."""
    known = [row for row in rows if row.speed_up is not None]
    if not known:
        return "Nothing could be measured."
    best = max(known, key=lambda row: row.speed_up or 0.0)
    one, speed_up, efficiency = best.measured, best.speed_up or 0.0, best.efficiency or 0.0
    if best is known[0]:
        return f"Nothing is faster than {_name(one)}: {one.samples_per_second:,.0f} samples/s."
    gain = f"{speed_up:.2f}x {_name(known[0].measured)} ({efficiency:.0%} of ideal)"
    return f"Fastest: {_name(one)} with {one.samples_per_second:,.0f} samples/s, {gain}."


def verdict(profile: Profile) -> str:
    """Return a profile in a paragraph."""
    found, step = profile.breakdown, profile.step_seconds
    bound = found.bound
    return (
        f"A step takes {1e3 * step:.3g} ms ({profile.batch_size / step:,.0f} samples/s): {found.compute:.0%} compute "
        f"({found.forward:.0%} forward, {found.backward:.0%} backward, {found.optimizer:.0%} optimizer), "
        f"{found.communication:.0%} communication that no computing hides, {found.data:.0%} waiting for data, "
        f"{found.other:.0%} other (Python, launching, waiting for another rank). What limits it is {bound}, "
        f"{ADVICE[bound]} (Under the profiler a step took {1e3 * profile.profiled_seconds:.3g} ms.)"
    )


def costs_markdown(profile: Profile) -> str:
    """Return the top costs as a table."""
    head = ["| operator | ms a step | share | calls a step |", "|---|---|---|---|"]
    rows = [
        f"| {cost.name} | {cost.milliseconds:.3g} | {cost.share:.0%} | {cost.calls:.3g} |"
        for cost in profile.costs
    ]
    return "\n".join([*head, *rows])


def _share(breakdown: StepBreakdown) -> str:
    return f"{getattr(breakdown, breakdown.bound):.0%}"


def _name(one: StrategyResult) -> str:
    plural = "s" if one.entry.devices > 1 else ""
    return f"{one.entry.strategy} on {one.entry.devices} device{plural}"

"""The results of the runs of a repeat, and their means with intervals."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rankzero import scalars
from rankzero.catalog import command_lines, deleted
from rankzero.confidence import half_width
from rankzero.experiment import Goal
from rankzero.experiment_file import CODE
from rankzero.repeats.plan import SEED, Repetition
from rankzero.reporting import markdown
from rankzero.reporting.markdown import inline
from rankzero.reporting.run_facts import fold
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all

_DATA, _DELETED = " data", "DELETED"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How one run of a repeat ended."""

    run: Repetition
    name: str
    status: str
    """FINISHED, FAILED, KILLED, DELETED, or an empty text if it has not ended."""
    reason: str
    metrics: Mapping[str, float]
    """The val/ metrics of its best evaluation, the goal's first, and its test/ metrics."""
    given: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Its settings but those that the repeat varies, and the digests of its data and code."""

    @property
    def finished(self) -> bool:
        """Whether the result counts."""
        return self.status == "FINISHED"

    @property
    def settled(self) -> bool:
        """Whether there is nothing to train: it finished, or somebody deleted it."""
        return self.status in ("FINISHED", _DELETED)


@dataclasses.dataclass(frozen=True)
class Mean:
    """One metric over the runs that finished."""

    mean: float
    half_width: float | None
    """Half of Student's 95 % interval of the mean; None with a single value."""
    lowest: float
    highest: float
    runs: int


def read(run: Repetition, folder: RunFolder) -> RunResult:
    """Return the result of a run by its journal. The folder need not exist."""
    name = folder.path.name
    if deleted.is_hidden(folder):
        back = command_lines.line(folder.root, "delete", "--restore", name)
        return RunResult(run, name, _DELETED, f"`{back}` brings it back", {})
    facts = fold(read_all(folder.events))
    goal, end = facts.goal.metric, facts.end
    # Without a best evaluation, the newest.
    groups = ("test/",) if facts.best_metrics else ("test/", "val/")
    newest = {key: value for key, value in facts.metrics.items() if key.startswith(groups)}
    found = scalars.numbers({**facts.best_metrics, **newest})
    # Sorted, with the goal first: every run and every table has the same order.
    order = sorted(found, key=lambda key: (key != goal, key))
    metrics = {key: found[key] for key in order if math.isfinite(found[key])}
    status, reason = (end.status, end.reason) if end else ("", "")
    # A resume on another number of processes, or on another device, keeps the samples of a step.
    varied = {SEED, "world_size", "device", *dict(run.values)}
    given = {key: text for key, text in facts.params.items() if key not in varied}
    given |= {f"{use}{_DATA}": one.digest for use, one in facts.data.items()}
    given |= {key: text for key, text in facts.environment.items() if key.startswith(CODE)}
    return RunResult(run, name, status, reason, metrics, given)


def means(results: Sequence[RunResult]) -> dict[str, Mean]:
    """Return the mean of each metric over the runs that finished.

    Runs that differ in the seed alone share their data, so with several combinations of settings
    the mean of each combination counts as one value. With one combination each seed does.
    """
    finished = [one for one in results if one.finished]
    found = {}
    for key in dict.fromkeys(key for one in finished for key in one.metrics):
        groups: dict[Any, list[float]] = {}
        for one in finished:
            if key in one.metrics:
                groups.setdefault(one.run.values, []).append(one.metrics[key])
        every = [value for group in groups.values() for value in group]
        by_group = [statistics.fmean(group) for group in groups.values()]
        values = by_group if len(groups) > 1 else every
        found[key] = Mean(
            statistics.fmean(values), half_width(values), min(every), max(every), len(every)
        )
    return found


def flat(found: Mapping[str, Mean]) -> dict[str, float]:
    """Return the means as metrics of the repeat's own run: ``val/accuracy/mean`` and others."""
    halves = {f"{key}/half_width": one.half_width for key, one in found.items()}
    known = {key: half for key, half in halves.items() if half is not None}
    return {f"{key}/mean": one.mean for key, one in found.items()} | known


def as_fields(results: Sequence[RunResult]) -> dict[str, Any]:
    """Return the results as plain values, for JSON."""
    runs = [
        {"run": one.name, **one.run.settings, "status": one.status, "metrics": dict(one.metrics)}
        for one in results
    ]
    metrics = {key: dataclasses.asdict(one) for key, one in means(results).items()}
    return {"metrics": metrics, "runs": runs}


def sentence(results: Sequence[RunResult], goal: Goal) -> str:
    """Return the goal's mean in words, and how many runs are missing."""
    finished = [one for one in results if one.finished]
    missing = len(results) - len(finished)
    lacks = f" {missing} of {len(results)} runs are missing." if missing else ""
    found = means(results).get(goal.metric)
    if found is None:
        return f"No run finished with a value of {goal.metric}.{lacks}"
    if found.half_width is None:
        return f"{goal.metric} {scalars.shown(found.mean)}, of a single value: no interval.{lacks}"
    counted = {one.run.values for one in finished if goal.metric in one.metrics}
    runs = str(found.runs)
    if found.runs < len(finished):
        runs = f"{runs} of {len(finished)}"
    over = f"{runs} seeds"
    if len(counted) > 1:
        keys = ", ".join(key for key, _ in finished[0].run.values)
        over = f"{len(counted)} values of {keys} ({runs} runs)"
    return (
        f"{goal.metric} {scalars.shown(found.mean)} ± {scalars.shown(found.half_width, 2)}, "
        f"Student's 95 % interval over {over}.{lacks}"
    )


def metric_table(results: Sequence[RunResult]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of means."""
    rows = []
    for key, one in means(results).items():
        margin = "" if one.half_width is None else f"± {scalars.shown(one.half_width, 2)}"
        numbers = [*map(scalars.shown, (one.mean, one.lowest, one.highest))]
        rows.append([key, numbers[0], margin, *numbers[1:], str(one.runs)])
    return ["metric", "mean", "95 %", "lowest", "highest", "runs"], rows


def run_table(results: Sequence[RunResult], goal: Goal) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of runs, sorted by their settings."""
    head = [*(key for key, _ in results[0].run.values), "seed", goal.metric, "status"]
    by_values: dict[Any, list[list[str]]] = {}
    for one in results:
        value = one.metrics.get(goal.metric)
        shown = "" if value is None else scalars.shown(value)
        cells = [*(text for _, text in one.run.values), str(one.run.seed), shown]
        by_values.setdefault(one.run.values, []).append([*cells, one.status or "not run"])
    return head, [row for rows in by_values.values() for row in rows]


def problems(results: Sequence[RunResult], goal: Goal) -> list[str]:
    """Return why runs are missing or lack the goal, and which ones differ from most others."""
    missing = [
        f"missing: {one.run.label}: {one.status}, {one.reason}"
        for one in results
        if one.status and not one.finished
    ]
    missing += [
        f"no {goal.metric}: {one.run.label}: {one.reason}"
        for one in results
        if one.finished and goal.metric not in one.metrics
    ]
    groups: dict[Any, list[RunResult]] = {}
    for one in results:
        if one.finished:
            groups.setdefault(one.run.values, []).append(one)
    return missing + [line for group in groups.values() for line in _differences(group)]


def _differences(group: Sequence[RunResult]) -> list[str]:
    """Return the runs that differ from most of the others in more than the seed."""
    usual = {}
    # A setting that a later version of RankZero added is no difference.
    for key in [key for key in group[0].given if all(key in one.given for one in group)]:
        values = Counter(one.given[key] for one in group)
        # An experiment may divide its data by the seed: then each run has its own.
        if not (key.endswith(_DATA) and len(values) == len(group) > 2):
            usual[key] = values.most_common(1)[0][0]
    found = []
    for one in group:
        odd = [(key, one.given[key], text) for key, text in usual.items() if one.given[key] != text]
        if odd:
            texts = ", ".join(f"{key} {own} and not {text}" for key, own, text in odd)
            found.append(f"differs: {one.run.label} has {texts}")
    return found


def page(name: str, results: Sequence[RunResult], goal: Goal) -> str:
    """Return the text of the repeat's page in MLflow."""
    tables = [
        markdown.table([*map(inline, head)], [[*map(inline, row)] for row in rows])
        for head, rows in (metric_table(results), run_table(results, goal))
    ]
    notes = [inline(line[0].upper() + line[1:]) for line in problems(results, goal)]
    again = f"`rankzero repeat {name}` trains what is missing. `--seeds` or `--over` adds runs."
    return "\n\n".join([f"**{sentence(results, goal)}**", *tables, *notes, again]) + "\n"

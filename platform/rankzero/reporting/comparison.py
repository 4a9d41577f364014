"""The differences between runs: results, speed, settings, code, packages, machine."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence

from rankzero.catalog import lookup
from rankzero.catalog.summary import read_summary
from rankzero.metric_names import SPEED
from rankzero.reporting import reproduce
from rankzero.reporting.run_facts import Facts, facts_of
from rankzero.run_store import provenance
from rankzero.run_store.folder import RunFolder
from rankzero.scalars import number, shown

_CODE = {
    "commit": "mlflow.source.git.commit",
    "branch": "mlflow.source.git.branch",
    "uncommitted changes": "rankzero.dirty",
    "experiment": "rankzero.experiment_file",
}
_MACHINE = ("host", "system", "cpu_count", "python", "torch", "gpu", "cuda", "driver", "nccl")
_SPEED, _WAIT, _STEP = "samples_per_second", "data_wait_fraction", "best at step"
_SPEEDS = {
    _SPEED: "samples/s",
    _WAIT: "waiting for data, %",
    "train_seconds": "training, s",
    "checkpoint_blocked_seconds": "checkpoints, s",
    "peak_memory_megabytes": "peak memory, MB",
}


@dataclasses.dataclass(frozen=True)
class RunSide:
    """One of the runs."""

    name: str
    status: str
    facts: Facts
    packages: Mapping[str, str]
    """Versions of all installed distributions by name; empty if they were not recorded."""
    patch: str
    """The uncommitted changes."""


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One value in each run; empty if a run does not have it."""

    key: str
    values: tuple[str, ...]
    change: str = ""
    """From the first run to the second, if there are two."""


def sides_of(folders: Sequence[RunFolder]) -> list[RunSide]:
    """Return the runs as sides of a comparison, by the names that MLflow shows."""
    return [
        RunSide(
            name,
            read_summary(folder).status,
            facts_of(folder),
            *provenance.read_artifacts(folder.artifacts),
        )
        for name, folder in zip(lookup.shown_names(folders), folders, strict=True)
    ]


def sections(
    sides: Sequence[RunSide], *, everything: bool = False
) -> dict[str, list[ComparisonRow]]:
    """Return the different values by kind; `everything`: equal values, too."""
    facts = [side.facts for side in sides]
    status = ComparisonRow("status", tuple(side.status for side in sides))
    kinds = {
        "Result": [status, *_numbers([*map(_metrics, facts)], digits=17)],
        "Speed": _speed_rows(facts),
        "Tags": _texts([one.tags for one in facts]),
        "Settings": _texts([one.params for one in facts]),
        "Data": _texts([{use: data.text for use, data in one.data.items()} for one in facts]),
        "Code": _texts([*map(_code, sides)]),
        # A run that did not write packages.txt has the versions of a few packages as tags.
        "Packages": _texts([s.packages or _tags(s.facts, "rankzero.package.") for s in sides]),
        "Machine": _texts([*map(_machine, facts)]),
    }
    found = {
        title: [row for row in rows if everything or len(set(row.values)) > 1]
        for title, rows in kinds.items()
    }
    return {title: rows for title, rows in found.items() if rows}


def patches(left: str, right: str) -> Iterator[str]:
    """Yield the differences of two uncommitted diffs.

    For each file its name, then its lines, with ``-`` if only the left diff has them and ``+`` if
    only the right has them.
    """
    first, second = _by_file(left), _by_file(right)
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) == second.get(name):
            continue
        if name in first and name in second:
            yield name
        else:
            yield f"{name} ({'first' if name in first else 'second'} only)"
        # Other commits have other lines around a change. Those are no uncommitted changes.
        lines = difflib.unified_diff(first.get(name, []), second.get(name, []), lineterm="", n=0)
        # The first two lines are a header.
        yield from (line for line in itertools.islice(lines, 2, None) if line[1:2] in ("+", "-"))


def _metrics(facts: Facts) -> dict[str, float]:
    found: dict[str, float] = {}
    if facts.best is not None:
        found = {f"best {facts.goal.metric}": facts.best, _STEP: facts.best_step}
    # The section about speed has the throughput, and the settings have the learning rate.
    others = ("throughput/", "lr/")
    shown = (key for key in sorted(facts.metrics) if not f"{key}/".startswith(others))
    return {**found, "steps": facts.steps, **{key: facts.metrics[key] for key in shown}}


def _speed_rows(facts: Sequence[Facts]) -> Iterator[ComparisonRow]:
    found = [*map(_speeds, facts)]
    speeds = [one[_SPEEDS[_SPEED]] for one in found if _SPEEDS[_SPEED] in one]
    ends = [dict(one.end.metrics) if one.end else {} for one in facts]
    margin = sum(number(one.get(f"{_SPEED}_half_width")) or 0.0 for one in ends)
    # A difference that the 95 % intervals contain may be noise, as in a run of seconds.
    same = len(speeds) == 2 and abs(speeds[0] - speeds[1]) <= margin
    for row in _numbers(found):
        yield dataclasses.replace(row, change="") if same and row.key == _SPEEDS[_SPEED] else row


def _speeds(facts: Facts) -> dict[str, float]:
    summary = dict(facts.end.metrics) if facts.end else {}
    # A run that was killed has no summary. Then its newest speed is the best that is known.
    if SPEED in facts.metrics:
        summary.setdefault(_SPEED, facts.metrics[SPEED])
    known = {
        title: summary[key] * (100 if key == _WAIT else 1)
        for key, title in _SPEEDS.items()
        # The times of a resumed run are its last attempt's. Its duration is that of all.
        if number(summary.get(key)) is not None
        and not (facts.attempts > 1 and key.endswith("_seconds"))
    }
    gpu = {f"GPU {key.replace('_', ' ')}": value for key, value in facts.gpu_means.items()}
    return {**known, "duration, s": facts.duration, **gpu}


def _code(side: RunSide) -> dict[str, str]:
    known = {title: side.facts.environment.get(tag, "") for title, tag in _CODE.items()}
    files = len(_by_file(side.patch))
    changes = f"{files} file{'s' * (files != 1)}" if side.patch else "none"
    # Without repetitions.
    texts = dict.fromkeys(text for text, *_ in side.facts.every_command)
    commands = "\n".join(shlex.join(reproduce.words(text)) for text in texts)
    return {**known, "uncommitted changes": changes, "commands": commands}


def _machine(facts: Facts) -> dict[str, str]:
    known = {name: facts.environment.get(f"rankzero.{name}", "") for name in _MACHINE}
    variables = _tags(facts, "rankzero.env.")
    return {**{name: text for name, text in known.items() if text}, **variables}


def _tags(facts: Facts, prefix: str) -> dict[str, str]:
    tags = facts.environment.items()
    return {key.removeprefix(prefix): text for key, text in tags if key.startswith(prefix)}


def _texts(found: Sequence[Mapping[str, str]]) -> Iterator[ComparisonRow]:
    for key in dict.fromkeys(itertools.chain(*found)):
        yield ComparisonRow(key, tuple(one.get(key, "") for one in found))


def _numbers(found: Sequence[Mapping[str, float]], digits: int = 4) -> Iterator[ComparisonRow]:
    """Yield a row for each key. `digits`: at most so many separate two values."""
    for key in dict.fromkeys(itertools.chain(*found)):
        values = [number(one.get(key)) for one in found]
        change = _change(*values) if len(values) == 2 and key != _STEP else ""
        texts = ["" if one is None else shown(one) for one in values]
        for more in range(5, digits + 1):
            if len(set(texts)) < len(set(map(repr, values))):
                texts = ["" if one is None else f"{one:.{more}g}" for one in values]
        yield ComparisonRow(key, tuple(texts), change)


def _change(before: float | None, after: float | None) -> str:
    if not before or after is None or after == before:
        return ""
    ratio = after / before
    # A factor between two signs says nothing. A NaN must return here, too.
    if not 0 < ratio < 1e6:
        return ""
    return f"{ratio:.2f}x" if ratio >= 2 or ratio <= 0.5 else f"{ratio - 1:+.1%}"


def _by_file(patch: str) -> dict[str, list[str]]:
    """Return a patch's lines by file. An untracked file has none."""
    found: dict[str, list[str]] = {}
    name, lines = "", list[str]()
    for line in patch.splitlines():
        if line.startswith("diff --git "):
            # Its lines begin after a header.
            name, lines = line.rpartition(" b/")[2], []
            found.setdefault(name, [])
        elif line.startswith("@@ "):
            lines = found.setdefault(name, [])
        elif line.startswith("# untracked: "):
            found[line.removeprefix("# ")] = []
        elif line[:1] in "+- ":
            lines.append(line)
    return found

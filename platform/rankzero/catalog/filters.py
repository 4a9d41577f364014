"""Which runs, in which order: ``status=FAILED``, ``val/accuracy>0.9``; by any column, param or metric. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import operator
import re
import time
from collections.abc import Callable, Iterable, Sequence

from rankzero.catalog.summary import Summary
from rankzero.config.renamed import new_name
from rankzero.errors import UserError

Value = str | float | bool | None

COLUMNS: dict[str, Callable[[Summary], Value]] = {
    "run": lambda one: one.name,
    "experiment": lambda one: one.experiment,
    "status": lambda one: one.status,
    "reason": lambda one: one.reason,
    "goal": lambda one: one.goal,
    "best": lambda one: one.best,
    "samples/s": lambda one: one.samples_per_second,
    "started": lambda one: one.started,
    "age": lambda one: time.time() - one.started,
    "duration": lambda one: one.seconds,
    "parent": lambda one: one.parent,
    "data": lambda one: one.data,
    "id": lambda one: one.mlflow_run_id,
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_CONDITION = re.compile(r"(?P<key>[^<>=!]+)(?P<sign>!=|>=|<=|==|=|>|<)(?P<value>[^<>=!]*)")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|min|h|d)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclasses.dataclass(frozen=True)
class Condition:
    """What a run must be like."""

    key: str
    sign: str
    value: str

    def holds(self, one: Summary) -> bool:
        """Tell whether it is; of a run that does not have the key, no."""
        found = value_of(one, self.key)
        if found is None:
            return False
        if self.sign in _COMPARE:
            real, bar = _real(found), _real(self.value)
            return real is not None and bar is not None and _COMPARE[self.sign](real, bar)
        return _alike(found, self.value) != (self.sign == "!=")


def parse(word: str) -> Condition:
    """Read a filter. Raises UserError for what is none."""
    found = _CONDITION.fullmatch(word)
    if found is None or not found["key"].strip():
        raise UserError(
            f"{word!r} is not a filter: write KEY=VALUE, or with !=, <, <=, > or >=; in quotes, since the shell takes "
            "< and > for itself: 'val/accuracy>0.9'"
        )
    condition = Condition(
        found["key"].strip(), found["sign"].replace("==", "="), found["value"].strip()
    )
    if condition.sign in _COMPARE and _real(condition.value) is None:
        raise UserError(
            f"{word!r}: {condition.sign} compares numbers, and {condition.value!r} is none"
        )
    return condition


def select(
    runs: Sequence[Summary], conditions: Iterable[Condition], sort: str | None = None
) -> list[Summary]:
    """Return the runs for which all conditions hold, sorted by a key (``-key``: the largest first).

    Runs without the key come last. Raises UserError for a key that no run has.
    """
    conditions = list(conditions)
    for key in (*(one.key for one in conditions), *([sort.removeprefix("-")] if sort else [])):
        _require(key, runs)
    kept = [one for one in runs if all(condition.holds(one) for condition in conditions)]
    return _sorted(kept, sort) if sort else kept


def value_of(one: Summary, key: str) -> Value:
    """Return what the run has under a key: a column, else the goal's best value, else a param, else a metric."""
    if key in COLUMNS:
        return COLUMNS[key](one)
    if key == one.goal and one.best is not None:
        return one.best
    if key not in one.params:
        key = new_name(key)
    return one.params.get(key, one.metrics.get(key))


def _require(key: str, runs: Sequence[Summary]) -> None:
    if not runs or any(value_of(one, key) is not None for one in runs) or key in COLUMNS:
        return
    known = sorted({*COLUMNS, *(key for one in runs for key in (*one.metrics, *one.params))})
    near = [
        name for name in known if name.rpartition("/")[2] == key or name.rpartition(".")[2] == key
    ]
    near = near or difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise UserError(f"no run has {key!r}; {hint}")


def _sorted(runs: Sequence[Summary], sort: str) -> list[Summary]:
    key, backwards = sort.removeprefix("-"), sort.startswith("-")
    have = [one for one in runs if not _missing(value_of(one, key))]
    numbers = all(_real(value_of(one, key)) is not None for one in have)
    have.sort(key=lambda one: _rank(value_of(one, key), numbers), reverse=backwards)
    return [*have, *(one for one in runs if _missing(value_of(one, key)))]


def _rank(value: Value, as_number: bool) -> tuple[float, str]:
    return (_real(value) or 0.0, "") if as_number else (0.0, str(value).casefold())


def _missing(value: Value) -> bool:
    return value is None or value != value


def _alike(found: Value, wanted: str) -> bool:
    real, bar = _real(found), _real(wanted)
    if real is not None and bar is not None:
        return real == bar
    return fnmatch.fnmatchcase(str(found).casefold(), wanted.casefold())


def _real(value: Value) -> float | None:
    """Return a number, a text that is one, or a span of time such as 90s, 5min, 2h, 1d in seconds; else None."""
    if isinstance(value, str) and (span := _SPAN.fullmatch(value)):
        return float(span[1]) * _SECONDS[span[2]]
    try:
        return None if value is None else float(value)
    except ValueError:
        return None

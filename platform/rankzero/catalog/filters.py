"""Select and sort runs by a column, param or metric: ``status=FAILED``, ``val/accuracy>0.9``."""

from __future__ import annotations

import dataclasses
import fnmatch
import operator
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rankzero.catalog.summary import Summary
from rankzero.config import hint
from rankzero.config.renamed import new_name
from rankzero.errors import UserError

_Value = str | float | bool | None

COLUMNS: dict[str, Callable[[Summary], _Value]] = {
    "run": lambda run: run.shown_name,
    "experiment": lambda run: run.experiment,
    "status": lambda run: run.status,
    "reason": lambda run: run.reason,
    "goal": lambda run: run.goal,
    "best": lambda run: run.best,
    "samples/s": lambda run: run.samples_per_second,
    "size": lambda run: run.bytes,
    "started": lambda run: run.started,
    "age": lambda run: time.time() - run.started,
    "duration": lambda run: run.seconds,
    "parent": lambda run: run.parent_mlflow_name or run.parent,
    "data": lambda run: run.data,
    "id": lambda run: run.mlflow_run_id,
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
# Two conditions in one word are a mistake: the value has a word, a sign and text without a space.
_CONDITION = re.compile(
    r"(?s)(?P<key>[^<>=!]+)(?P<sign>[!><=]=|[=><])"
    r"(?P<value>(?![<>=!])(?!.*\s\w[\w./-]*(?:[!><=]=|[=><])\S).*)"
)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|min|h|d)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclasses.dataclass(frozen=True)
class _Condition:
    """A condition on a run's value under `key`."""

    key: str
    sign: str
    value: str

    def holds(self, run: Summary) -> bool:
        """Return whether the condition holds. For a run without the key it does not."""
        value = value_of(run, self.key)
        if value is None:
            return False
        # A run that has another name in MLflow is still known by its folder's.
        folder = {"run": run.name, "parent": run.parent}.get(self.key)
        if folder not in (None, value) and self._matches(str(folder)):
            return self.sign == "="
        left, right = _number(value), _number(self.value)
        if self.sign in _COMPARE:
            return left is not None and right is not None and _COMPARE[self.sign](left, right)
        # The text first: NaN does not equal itself. A tag is a text, such as a version: 1.1, 1.10.
        is_equal = self._matches(str(value)) or (
            right is not None and left == right and value is not run.tags.get(self.key)
        )
        return is_equal != (self.sign == "!=")

    def _matches(self, text: str) -> bool:
        # Only * and ? are special. A bracket may begin a list.
        pattern = self.value.casefold().replace("[", "[[]")
        return fnmatch.fnmatchcase(text.casefold(), pattern)


def seconds(text: str) -> float | None:
    """Return a time such as 90s, 5min, 2h, 1d in seconds, or None for another text."""
    span = _SPAN.fullmatch(text)
    return float(span[1]) * _SECONDS[span[2]] if span else None


def parse(text: str) -> _Condition:
    """Read a condition. Raises UserError if the text is none."""
    found = _CONDITION.fullmatch(text)
    if found is None or not found["key"].strip():
        raise UserError(
            f"{text!r} is not a filter: write KEY=VALUE, or with !=, <, <=, > or >=; "
            "in quotes, because the shell reads < and >: 'val/accuracy>0.9'"
        )
    key, sign, value = found["key"].strip(), found["sign"].replace("==", "="), found["value"]
    condition = _Condition(key, sign, value.strip())
    if sign in _COMPARE and _number(condition.value) is None:
        raise UserError(f"{text!r}: {sign} needs a number, got {condition.value!r}")
    return condition


def candidates(
    runs: Sequence[Summary], conditions: Iterable[_Condition], *, everything: bool
) -> list[Summary]:
    """Return the runs to select from: no children, unless `everything`, or a condition names one.

    A search's trials are many. But somebody who names a run, or a parent, means that one. A
    pattern names no run.
    """
    names = any(
        one.sign == "="
        and (one.key == "parent" or (one.key in ("run", "id") and "*" not in one.value))
        for one in conditions
    )
    return [run for run in runs if everything or names or run.parent is None]


def select(
    runs: Sequence[Summary], conditions: Iterable[_Condition], sort: str | None = None
) -> list[Summary]:
    """Return the runs for which all conditions hold, sorted by a key (``-key``: largest first).

    Runs without the key come last. Raises UserError for a key that no run has.
    """
    conditions = list(conditions)
    key = (sort or "").removeprefix("-")
    for needed in filter(None, (*(condition.key for condition in conditions), key)):
        _require(needed, runs)
    selected = [run for run in runs if all(condition.holds(run) for condition in conditions)]
    if not key:
        return selected
    pairs = [(value_of(run, key), run) for run in selected]
    # NaN has no place in an order: it is the only value that does not equal itself.
    have = [(value, run) for value, run in pairs if value is not None and value == value]
    lack = [run for value, run in pairs if value is None or value != value]
    are_numbers = all(_number(value) is not None for value, _ in have)
    order: Callable[[_Value], Any] = _number if are_numbers else lambda value: str(value).casefold()
    have.sort(key=lambda pair: order(pair[0]), reverse=sort != key)
    return [run for _, run in have] + lack


def value_of(run: Summary, key: str) -> _Value:
    """Return a column, the goal's best, the first param, metric or tag, or a field of --json."""
    if key in COLUMNS:
        return COLUMNS[key](run)
    if key == run.goal and run.best is not None:
        return run.best
    if key not in run.params:
        key = new_name(key)
    field = getattr(run, key) if key in run._fields else None
    return run.params.get(key, run.metrics.get(key, run.tags.get(key, field)))


def _require(key: str, runs: Sequence[Summary]) -> None:
    if not runs or key in COLUMNS or any(value_of(run, key) is not None for run in runs):
        return
    own = (key for run in runs for key in (*run.metrics, *run.params, *run.tags))
    known = sorted({*COLUMNS, *own})
    raise UserError(f"no run has {key!r}; {hint(key, known, '`rankzero runs --json` has all')}")


def _number(value: _Value) -> float | None:
    """Return a number, a text that is one, or a time such as 90s, 5min, 2h, 1d in seconds."""
    if isinstance(value, str) and (span := seconds(value)) is not None:
        return span
    try:
        return None if value is None else float(value)
    except ValueError:
        return None

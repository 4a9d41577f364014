"""A run's metrics as tables with a row for each step. Imports pandas when it is called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rankzero import scalars
from rankzero.events import Evaluated, Event, StepsLogged, SystemSampled
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all

if TYPE_CHECKING:
    from pandas import DataFrame

_Cell = tuple[str, int, float, float]
"""Metric, step, time, value."""
_COLUMNS = {"step": "step (metric)", "time": "time (metric)"}
"""The columns of metrics whose names the table's own columns have."""


def metrics(folder: RunFolder, names: Sequence[str] = ()) -> DataFrame:
    """Return the metrics by step, with columns ``step``, ``time``, and one for each metric.

    `names`: only these metrics. A step that was repeated after a crash has its first values, as in
    MLflow. A metric that a step does not have is NaN. One called ``time`` is ``time (metric)``.
    """
    return _table(cell for cell in _cells(read_all(folder.events)) if not names or cell[0] in names)


def system(folder: RunFolder) -> DataFrame:
    """Return the system metrics by sample; the column ``step`` is the sample's number."""
    return _table(_cells(one for one in folder.all_events() if isinstance(one, SystemSampled)))


def _cells(events: Iterable[Event]) -> Iterator[_Cell]:
    """Yield every number, in the order of the journal."""
    for event in events:
        found: list[tuple[str, Any, Any, Any]] = []
        match event:
            case StepsLogged(steps=steps, times=times, metrics=metrics):
                # Not strict: a journal of a foreign writer may have shorter columns.
                for key, column in metrics.items():
                    found += [(key, *cell) for cell in zip(steps, times, column, strict=False)]
            case Evaluated(step=step) | SystemSampled(sample=step):
                found = [(key, step, event.time, value) for key, value in event.metrics.items()]
            case _:
                pass
        for key, step, at, value in found:
            whole, when, real = scalars.step(step), scalars.number(at), scalars.number(value)
            if whole is not None and when is not None and real is not None:
                # A float stays as it is. An infinity is NaN only on the way to MLflow.
                yield key, whole, when, value if isinstance(value, float) else real


def _table(cells: Iterable[_Cell]) -> DataFrame:
    """Return the values as a table, sorted by step."""
    import pandas

    # The first value of a repeated step stays.
    rows: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    for key, step, at, value in cells:
        rows.setdefault(step, {}).setdefault(_COLUMNS.get(key, key), value)
        times.setdefault(step, at)
    steps = sorted(rows)
    frame = pandas.DataFrame.from_records([rows[step] for step in steps])
    frame.insert(0, "step", pandas.Series(steps, dtype="int64"))
    seconds = [times[step] for step in steps]
    frame.insert(1, "time", pandas.to_datetime(seconds, unit="s", utc=True, errors="coerce"))
    return frame

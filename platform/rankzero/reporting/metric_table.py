"""A run's metrics as tables: a row for each step. pandas is imported when a table is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rankzero import scalars
from rankzero.events import Evaluated, Event, StepsLogged, SystemSampled
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all

if TYPE_CHECKING:
    from pandas import DataFrame

Cell = tuple[str, int, float, float]  # metric, step, time, value


def metrics(folder: RunFolder, names: Sequence[str] = ()) -> DataFrame:
    """Return the metrics by step, or only these: columns ``step``, ``time``, and one for each metric.

    A step that was done again after a crash has its first values, as in MLflow. What was not measured at a step is NaN.
    """
    return table(cell for cell in cells(read_all(folder.events)) if not names or cell[0] in names)


def system(folder: RunFolder) -> DataFrame:
    """Return what GPUs and host did, by sample: columns ``step`` (the sample's number), ``time``, the metrics."""
    return table(cells(event for event in folder.all_events() if isinstance(event, SystemSampled)))


def cells(events: Iterable[Event]) -> Iterator[Cell]:
    """Yield every value, in the order of the journal; not what is no number."""
    for key, step, at, value in _written(events):
        whole, when, real = scalars.step(step), scalars.number(at), scalars.number(value)
        if whole is not None and when is not None and real is not None:
            yield key, whole, when, value if isinstance(value, float) else real


def _written(events: Iterable[Event]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield every value as the journal has it: whatever is written there."""
    for event in events:
        match event:
            case StepsLogged():
                for key, column in event.metrics.items():
                    for step, at, value in zip(event.steps, event.times, column, strict=False):
                        yield key, step, at, value
            case Evaluated(step=step) | SystemSampled(sample=step):
                for key, value in event.metrics.items():
                    yield key, step, event.time, value
            case _:
                pass


def table(found: Iterable[Cell]) -> DataFrame:
    """Return the values as a table, sorted by step."""
    import pandas

    rows: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    for key, step, at, value in found:
        rows.setdefault(step, {}).setdefault(key, value)
        times.setdefault(step, at)
    steps = sorted(rows)
    frame = pandas.DataFrame.from_records([rows[step] for step in steps])
    frame.insert(0, "step", pandas.Series(steps, dtype="int64"))
    frame.insert(
        1,
        "time",
        pandas.to_datetime([times[step] for step in steps], unit="s", utc=True, errors="coerce"),
    )
    return frame

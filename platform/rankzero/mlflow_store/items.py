"""What MLflow is sent: points, tags, beginnings and ends."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from rankzero.events import (
    DataDescribed,
    RunEnded,
    RunStarted,
)

RETRIES = "rankzero.retries"
DESCRIPTION = "mlflow.note.content"


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    milliseconds: int
    step: int
    model_id: str | None = None


@dataclasses.dataclass(frozen=True)
class Points:
    """At most a thousand points: what MLflow takes at once."""

    points: list[Point]


@dataclasses.dataclass(frozen=True)
class Tags:
    """Tags to set on the run."""

    tags: dict[str, str]


@dataclasses.dataclass(frozen=True)
class End:
    """The last thing MLflow hears of an attempt."""

    event: RunEnded


Item = RunStarted | DataDescribed | Points | Tags | End


def name_of(item: Item) -> str:
    """Return what an item is called where it is told that it was set aside."""
    match item:
        case Points(points):
            return f"metric {points[0].key} at step {points[0].step}"
        case Tags(tags):
            return f"tag {next(iter(tags))}"
        case _:
            return type(item).__name__

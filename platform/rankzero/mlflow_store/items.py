"""The items that MLflow is sent: points, tags, beginnings and ends of attempts."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from rankzero.events import DataDescribed, ParamsLogged, RunEnded, RunStarted

RETRIES = "rankzero.retries"
DESCRIPTION = "mlflow.note.content"
CLAIM = "rankzero.claim"
"""The tag that says which attempt the run belongs to. docs/decisions/0075 has the reasons."""


class MetricPoint(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    milliseconds: int
    step: int
    model_id: str | None = None


@dataclasses.dataclass(frozen=True)
class MetricBatch:
    """The points of one request, or of one transaction."""

    points: list[MetricPoint]


@dataclasses.dataclass(frozen=True)
class Tags:
    """Tags to set on the run."""

    tags: dict[str, str]


MlflowItem = RunStarted | DataDescribed | ParamsLogged | MetricBatch | Tags | RunEnded


def claim_of(event: RunStarted) -> str:
    """Return the attempt's value of the tag `CLAIM`: its start, which is its own, and its host."""
    return f"{event.time!r} {event.environment.get('rankzero.host', '')}".strip()


def name_of(item: MlflowItem) -> str:
    """Return how an item is called in the list of what was set aside."""
    match item:
        case MetricBatch(points):
            return f"metric {points[0].key} at step {points[0].step}"
        case ParamsLogged(params=params):
            return f"param {next(iter(params))}"
        case Tags(tags) | RunStarted(environment=tags) if tags:
            return f"tag {next(iter(tags))}"
        case _:
            return type(item).__name__


def parts_of(item: MlflowItem) -> list[MlflowItem]:
    """Return smaller items to send instead of a refused one, or [] if it cannot be divided."""
    match item:
        case MetricBatch(points) if len(points) > 1:
            # Halving again and again finds the points that are to blame, and saves the others.
            half = len(points) // 2
            return [MetricBatch(points[:half]), MetricBatch(points[half:])]
        case ParamsLogged(time, params) if len(params) > 1:
            return [ParamsLogged(time, {key: value}) for key, value in params.items()]
        case Tags(tags) if len(tags) > 1:
            return [Tags({key: value}) for key, value in tags.items()]
        case RunStarted(time, params) if params:
            return [dataclasses.replace(item, params={}), ParamsLogged(time, params)]
        case RunStarted(environment=tags) if len(tags) > 1:
            return [dataclasses.replace(item, environment={key: tags[key]}) for key in tags]
        case _:
            return []

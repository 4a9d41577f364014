"""How an experiment's runs are shown first in MLflow's UI: which columns, and which few charts before all others. Pure.

MLflow keeps a view that somebody saves in a tag of the experiment, and lists it under "Views"; an address that ends in
`QUERY` opens it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from rankzero.metric_names import SPEED, WHOLE_RUN

ID, NAME = "rankzero", "RankZero"
TAG = f"mlflow.sharedViewState.{ID}"
QUERY = f"viewStateShareKey={ID}"
BUSY_GPUS = "system/gpu_utilization_percentage"
BEST, WHOLE_SPEED = f"{WHOLE_RUN}/best", f"{WHOLE_RUN}/samples_per_second"
FIRST = "What matters first"
ALWAYS = (
    "1",
    "attributes.`Run Name`",
    "runDateAndNestInfo",
    "duration",
)  # MLflow's names for what is always there
FOLDED = (
    "val",
    "train",
    "throughput",
    WHOLE_RUN,
    "search",
    "Model metrics",
    "System metrics",
)  # MLflow's sections
TRIAL_NAME = 260  # pixels; in MLflow's 190 all trials of a study are called the same
SINCE = 1_767_225_600_000  # a view has a date: always the same one, so that it is written once


def saved(goal: str) -> str:
    """Return the tag's value for an experiment whose runs are judged by the metric `goal`."""
    text = json.dumps(state(goal), separators=(",", ":"), sort_keys=True).encode()
    packed = (
        "deflate;" + base64.b64encode(zlib.compress(text, 9)).decode()
    )  # a tag has at most 5,000 characters
    return json.dumps({"name": NAME, "createdAt": SINCE, "updatedAt": SINCE, "state": packed})


def is_ours(value: str | None) -> bool:
    """Tell whether a tag's value may be replaced: there is none, or nobody has changed the view since it was saved."""
    if value is None:
        return True
    try:
        envelope = json.loads(value)
        return bool(envelope["createdAt"] == envelope["updatedAt"] == SINCE)
    except (ValueError, KeyError, TypeError):
        return False


def state(goal: str) -> dict[str, Any]:
    """Return the view as MLflow's UI has it."""
    return {
        "selectedColumns": list(columns(goal)),
        "columnOrder": [*ALWAYS, *columns(goal)],  # MLflow's own: by the alphabet
        "columnWidths": {
            ALWAYS[1]: TRIAL_NAME,
            **{column: _width(column) for column in columns(goal)},
        },
        "compareRunSections": [
            _section(FIRST, shown=True),
            *(_section(name, shown=False) for name in FOLDED),
        ],
        "compareRunCharts": [_card(key) for key in first_charts(goal)],
        "isAccordionReordered": True,  # else the sections are sorted by their names
        "hideEmptyCharts": True,
    }


def columns(goal: str) -> Iterator[str]:
    """Return the columns beside a run's name and status, when it began and what it took, which are always there."""
    yield from (f"metrics.`{key}`" for key in (goal, WHOLE_SPEED) if key)
    yield from (f"params.`{key}`" for key in ("train.batch_size", "lr", "train.precision"))
    yield from (f"metrics.`{key}`" for key in (BUSY_GPUS, BEST))


def first_charts(goal: str) -> Sequence[str]:
    """Return the metrics whose charts come first."""
    return list(
        dict.fromkeys(
            key for key in (goal, "train/loss", "val/loss", SPEED, WHOLE_SPEED, BUSY_GPUS) if key
        )
    )


def _width(column: str) -> int:
    """Return how many pixels show the whole of a column's name."""
    return max(80, 22 + 63 * len(column.partition("`")[2]) // 10)


def _section(name: str, *, shown: bool) -> dict[str, Any]:
    return {
        "uuid": f"{ID}-{name}",
        "name": name,
        "display": shown,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
    }


def _card(key: str) -> dict[str, Any]:
    by_time = (
        {"xAxisKey": "time", "useGlobalXaxisKey": False}
        if key.startswith("system/")
        else {"xAxisKey": "step"}
    )
    line = {} if key == WHOLE_SPEED else {**_LINE, **by_time}
    return {
        "type": "LINE" if line else "BAR",
        "uuid": f"{ID}-{key}",
        "metricSectionId": f"{ID}-{FIRST}",
        "metricKey": key,
        "displayName": key,
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": False,
        **line,
    }


_LINE: dict[str, Any] = {
    "lineSmoothness": 0,
    "xAxisScaleType": "linear",
    "scaleType": "linear",
    "selectedXAxisMetricKey": "",
    "range": {},
    "yAxisKey": "metric",
    "yAxisExpressions": [],
    "ignoreOutliers": False,
    "useGlobalXaxisKey": True,
    "useGlobalLineSmoothing": True,
}

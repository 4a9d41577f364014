"""The view of an experiment's runs in MLflow's page: its columns, and the charts that come first.

MLflow keeps a view that a user shares in a tag of the experiment, and lists it under "Views". An
address that ends in `QUERY` opens it. The format is not documented (seen in MLflow 3.17.2). A
MLflow that reads another format ignores the tag, or shows its own view: nothing else depends on it.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from rankzero.metric_names import SPEED, WHOLE_RUN
from rankzero.mlflow_store import limits

_ID, _NAME = "rankzero", "RankZero"
TAG = f"mlflow.sharedViewState.{_ID}"
QUERY = f"viewStateShareKey={_ID}"
BUSY_GPUS = "system/gpu_utilization_percentage"
WHOLE_SPEED = f"{WHOLE_RUN}/samples_per_second"
# The view's date. It is constant, so that an unchanged view has an unchanged tag.
CREATED = 1_767_225_600_000
_FIRST = "What matters first"
# MLflow's names for the columns that are always there.
_RUN_NAME = "attributes.`Run Name`"
_ALWAYS = ("1", _RUN_NAME, "runDateAndNestInfo", "duration")
# Wide enough for the end of a trial's name. In MLflow's 190, a study's trials all look alike.
_RUN_NAME_PIXELS = 260
# MLflow's sections of charts.
_FOLDED = (
    "val",
    "test",
    "train",
    "throughput",
    WHOLE_RUN,
    "search",
    "Model metrics",
    "System metrics",
)
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


def tag_value(goal: str) -> str:
    """Return the value of `TAG` for an experiment whose goal metric is `goal`."""
    goal = goal and limits.name(goal)
    columns = [
        # The best value first: MLflow's column of the goal has the newest.
        *(f"metrics.`{key}`" for key in (f"{WHOLE_RUN}/best", WHOLE_SPEED)),
        *(f"params.`{key}`" for key in ("train.batch_size", "lr", "train.precision")),
        *(f"metrics.`{key}`" for key in (BUSY_GPUS, goal) if key),
    ]
    # As many pixels as the whole name of a column takes.
    widths = {column: max(80, 26 + 7 * len(column.partition("`")[2])) for column in columns}
    charts = dict.fromkeys((goal, "train/loss", "val/loss", SPEED, WHOLE_SPEED, BUSY_GPUS))
    state = {
        "selectedColumns": columns,
        # MLflow sorts columns by their names.
        "columnOrder": [*_ALWAYS, *columns],
        "columnWidths": {_RUN_NAME: _RUN_NAME_PIXELS, **widths},
        "compareRunSections": [
            {
                "uuid": f"{_ID}-{name}",
                "name": name,
                "display": name == _FIRST,
                "isReordered": True,
                "deleted": False,
                "isGenerated": False,
            }
            for name in (_FIRST, *_FOLDED)
        ],
        "compareRunCharts": [_chart(key) for key in charts if key],
        # MLflow sorts sections by their names.
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
    }
    text = json.dumps(state, separators=(",", ":"), sort_keys=True).encode()
    # A tag has at most 5,000 characters.
    packed = "deflate;" + base64.b64encode(zlib.compress(text, 9)).decode()
    dates = {"createdAt": CREATED, "updatedAt": CREATED}
    return json.dumps({"name": _NAME, **dates, "state": packed})


def is_ours(value: str | None) -> bool:
    """Return whether a tag's value may be replaced: it is missing, or no user changed the view."""
    if value is None:
        return True
    try:
        view = json.loads(value)
        return bool(view["createdAt"] == view["updatedAt"] == CREATED)
    except (ValueError, KeyError, TypeError):
        return False


def _chart(key: str) -> dict[str, Any]:
    x_axis = (
        {"xAxisKey": "time", "useGlobalXaxisKey": False}
        if key.startswith("system/")
        else {"xAxisKey": "step"}
    )
    line = {} if key == WHOLE_SPEED else {**_LINE, **x_axis}
    return {
        "type": "LINE" if line else "BAR",
        "uuid": f"{_ID}-{key}",
        "metricSectionId": f"{_ID}-{_FIRST}",
        "metricKey": key,
        "displayName": key,
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": False,
        **line,
    }

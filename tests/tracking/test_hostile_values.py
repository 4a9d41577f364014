"""Names and values that MLflow refuses: stored if possible, else reported once and shown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero import scalars
from rankzero.events import Evaluated, RunStarted, StepsLogged
from rankzero.mlflow_store import limits
from rankzero.mlflow_store.client import MlflowRuns, RunRecord
from rankzero.mlflow_store.items import MetricBatch
from rankzero.run_store.delivery_state import DeliveryState
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.translate import metric_name, translate
from support.fuzz import patient, seldom, thorough
from support.memory_store import deliver
from support.runs import T0, append, ended, make_folder

pytestmark = patient
KEYS = 10_000

ODD = ["a(b", "a)b", "a_b", "a b", "../x", "..", "x" * 300, "x" * 299 + "y", "\x00", "😀"]
names = st.text(max_size=20) | st.sampled_from(ODD)
HUGE = [10**400, -(10**400), 2**63, 5e-324, -0.0, 1.7976931348623157e308]
numbers = st.floats() | st.integers() | st.sampled_from(HUGE)


def delivered(folder: RunFolder) -> tuple[DeliveryState, RunRecord]:
    deliverer = deliver(Deliverer(folder))
    deliverer.commit()
    assert not deliverer.state.retries.failures, deliverer.state
    uri = folder.identity.tracking_uri
    return deliverer.state, MlflowRuns(uri).find_run(str(deliverer.state.run_id))


@thorough
@given(st.lists(names, max_size=12))
def test_no_two_metrics_become_one(keys: list[str]) -> None:
    metrics = dict.fromkeys(keys, 1.0)
    items, progress = translate([Evaluated(T0, 7, metrics, False)], DeliveryState())
    sent = [point.key for item in items if isinstance(item, MetricBatch) for point in item.points]
    stored = {key: metric_name(key, progress.curves) for key in metrics}
    assert list(stored.values()) == sent
    assert len(set(stored.values())) == len(stored)
    again = Evaluated(T0, 8, dict.fromkeys(reversed(keys), 1.0), False)
    later = translate([again], progress)[1].curves
    assert {key: metric_name(key, later) for key in keys} == stored  # for good
    changed = [key for key, name in stored.items() if key != name]
    assert progress.problems.altered == len(changed)
    assert len(progress.problems.remarks) == min(len(changed), 20)


@thorough
@given(st.lists(names, max_size=12))
def test_no_two_params_become_one(keys: list[str]) -> None:
    stored = limits.names(keys)
    assert len(set(stored.values())) == len(set(keys))
    assert all(stored[key] == key for key in keys if limits.name(key) == key)
    assert all(
        limits.name(name) == name and len(name) <= limits.KEY_LENGTH for name in stored.values()
    )


@thorough
@given(
    st.lists(st.tuples(names, numbers | st.none() | st.text(max_size=3)), min_size=1, max_size=10)
)
def test_every_value_is_sent_or_reported(rows: list[tuple[str, Any]]) -> None:
    metrics = dict(rows)
    items, progress = translate([Evaluated(T0, 7, metrics, False)], DeliveryState())
    sent = [point for item in items if isinstance(item, MetricBatch) for point in item.points]
    assert len(sent) + progress.problems.rejected == len(metrics)
    for key, value in metrics.items():
        found = [point.value for point in sent if point.key == metric_name(key, progress.curves)]
        number = scalars.number(value)
        assert [repr(one) for one in found] == ([] if number is None else [repr(number)])
        if scalars.is_infinite(value):
            assert metric_name(key, progress.curves) in progress.curves.infinite
    told = progress.problems.altered + progress.problems.rejected
    assert told >= sum(
        scalars.is_infinite(value) or scalars.number(value) is None for value in metrics.values()
    )


@seldom
@given(
    st.dictionaries(names, numbers, max_size=8),
    st.dictionaries(names, st.text(max_size=30), max_size=8),
)
def test_mlflow_has_what_the_state_says(
    tmp_path_factory: pytest.TempPathFactory,
    sqlite_of_all: str,
    metrics: dict[str, Any],
    params: dict[str, str],
) -> None:
    folder = make_folder(tmp_path_factory.mktemp("run"), sqlite_of_all)
    append(
        folder, RunStarted(T0, params, {}, 1), Evaluated(T0, 3, metrics, False), ended(metrics={})
    )
    progress, run = delivered(folder)
    stored = limits.names(params)
    assert run.params == {
        stored[key]: limits.head(value, limits.PARAM_LENGTH) for key, value in params.items()
    }
    assert len(run.metrics) == len(metrics) and run.status == "FINISHED"
    for key, value in metrics.items():
        stored_value, number = run.metrics[metric_name(key, progress.curves)], scalars.number(value)
        assert stored_value == number or (math.isnan(stored_value) and math.isnan(number))


def test_ten_thousand_keys_and_what_cannot_be_stored(sqlite: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, sqlite)
    metrics: dict[str, list[float]] = {
        f"layer_{number}/norm": [float(number)] for number in range(KEYS)
    }
    odd: dict[str, Any] = {
        "tps(GPU)": [1.0],
        "tps[GPU]": [2.0],
        "tps_GPU_": [3.0],
        "n" * 300: [4.0],
        "größe": [5.0],
        "huge": [10**400],
        "minus": [-math.inf],
        "nan": [math.nan],
        "text": ["x"],
        "big": [2**62],
    }
    params = {
        "long": "x" * 7000,
        "fits": "x" * 6000,
        "a(b": "1",
        "a[b": "2",
        "zero\x00": "a\x00b",
        "ünï": "🙂",
    }
    append(
        folder,
        RunStarted(T0, params, {"tag": "y" * 9000}, 1),
        StepsLogged([1], [T0], {**metrics, **odd}),
    )
    append(folder, ended(metrics={}))
    progress, run = delivered(folder)
    assert len(run.metrics) == KEYS + len(odd) - 1  # all but the text
    assert {run.metrics[name] for name in run.metrics if name.startswith("tps_GPU_")} == {
        1.0,
        2.0,
        3.0,
    }
    assert run.metrics["größe"] == 5.0 and run.metrics["big"] == 2.0**62
    assert all(math.isnan(run.metrics[name]) for name in ("huge", "minus", "nan"))
    assert len(run.params) == len(params) and run.params["fits"] == params["fits"]
    assert sorted(value for key, value in run.params.items() if key.startswith("a_b")) == ["1", "2"]
    page = run.tags["mlflow.note.content"]
    for words in (
        "param 'long': 7,000 characters, of which MLflow keeps 6,000",
        "metric huge: infinite from step 1",
        "metric minus: infinite from step 1",
        "metric text: not a number",
        "tag 'tag': 9,000 characters",
        "metric 'tps(GPU)'",
        "characters that a database refuses",
    ):
        assert any(words in line for line in delivery_status.status(folder).trouble), words
        assert words.replace("'", "") in page.replace("'", ""), words
    assert progress.problems.rejected == 1 and run.tags["rankzero.rejected"].startswith(
        "1 things set aside"
    )
    assert len(delivery_status.status(folder).trouble) < 30

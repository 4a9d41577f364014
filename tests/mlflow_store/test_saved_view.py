"""The view that `rankzero ui` saves: once, and never over a view that a user changed."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest

from rankzero.mlflow_store import saved_view
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store.folder import Identity


def unpacked(value: str) -> dict[str, Any]:
    packed = json.loads(value)["state"].removeprefix("deflate;")
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return found


def test_a_view_fits_a_tag() -> None:
    value = saved_view.tag_value("val/" + "m" * 200)
    state = unpacked(value)
    assert len(value) < 5000
    assert state["selectedColumns"][:2] == [
        "metrics.`whole_run/best`",
        "metrics.`whole_run/samples_per_second`",
    ]
    shown = [section["name"] for section in state["compareRunSections"] if section["display"]]
    assert shown == ["What matters first"] and 4 <= len(state["compareRunCharts"]) <= 8


def test_charts_and_sections_have_ids_also_without_a_goal() -> None:
    for goal in ("", "train/loss", "val/accuracy"):
        state = unpacked(saved_view.tag_value(goal))
        cards = [card["uuid"] for card in state["compareRunCharts"]]
        assert len(set(cards)) == len(cards) and "metrics.``" not in state["selectedColumns"]
        assert {card["metricSectionId"] for card in state["compareRunCharts"]} == {
            "rankzero-What matters first"
        }


def test_a_goal_has_its_name_in_mlflow() -> None:
    state = unpacked(saved_view.tag_value("val/top5(acc)"))
    assert "metrics.`val/top5_acc_`" in state["selectedColumns"]
    assert "val/top5_acc_" in {card["metricKey"] for card in state["compareRunCharts"]}


@pytest.mark.parametrize(
    "value", ["", "[]", "null", "{}", '{"createdAt": 1, "updatedAt": 2}', "deflate;xxx"]
)
def test_a_view_that_a_user_saved_is_not_ours(value: str) -> None:
    assert not saved_view.is_ours(value)


def test_a_view_is_saved_and_kept_if_a_user_changed_it(sqlite: str) -> None:
    tracker, value = MlflowRuns(sqlite), saved_view.tag_value("val/loss")
    assert tracker.save_view("new", "val/loss") is None
    opened = tracker.open_run(Identity("a", "0" * 32, "new", sqlite), 1.0)

    def save(goal: str) -> str:
        assert tracker.save_view("new", goal) == opened.experiment_id
        return str(tracker._client.get_experiment(opened.experiment_id).tags[saved_view.TAG])

    assert save("val/loss") == value and save("val/accuracy") != value
    changed = json.dumps({**json.loads(value), "updatedAt": saved_view.CREATED + 1})
    tracker._client.set_experiment_tag(opened.experiment_id, saved_view.TAG, changed)
    assert save("val/loss") == changed
    tracker._client.delete_experiment(opened.experiment_id)
    assert tracker.save_view("new", "val/loss") is None

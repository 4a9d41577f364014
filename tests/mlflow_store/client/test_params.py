from __future__ import annotations

from rankzero.mlflow_store import limits
from rankzero.mlflow_store.client.params import new_and_changed


def test_a_param_with_another_value_becomes_a_tag() -> None:
    params = {"lr": "0.1", "train.epochs": "20", "width": "8"}
    new, tags = new_and_changed(params, {"lr": "0.1", "train.epochs": "10"})
    assert new == {"width": "8"}
    assert tags == {"rankzero.param.train.epochs": "20"}


def test_a_param_is_compared_as_mlflow_stores_it() -> None:
    long = "x" * (limits.PARAM_LENGTH + 10)
    stored, _ = new_and_changed({"text": long}, {})
    assert len(stored["text"]) == limits.PARAM_LENGTH
    assert new_and_changed({"text": long}, stored) == ({}, {})

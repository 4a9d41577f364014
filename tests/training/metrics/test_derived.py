"""Metrics that an experiment derives from finished values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.training.metrics.derived import derived, derived_columns


class F1(Experiment):
    def derive(self, values: Mapping[str, Any]) -> Mapping[str, float]:
        found = {"f1": 2 * values["p"] * values["r"] / (values["p"] + values["r"])}
        if values["loss"] > 0:
            found["perplexity"] = np.exp(values["loss"])
        return found


class Wrong(Experiment):
    def derive(self, values: Mapping[str, Any]) -> Mapping[str, float]:
        return {"loss": 1.0} if values["p"] else {"text": "x"}  # type: ignore[dict-item]


def test_each_step_is_derived_by_itself() -> None:
    columns = {"loss": [0.0, 1000.0], "p": [0.5, 0.0], "r": [1.0, 0.0]}
    found = derived_columns(F1(), columns, {})
    # Neither 0/0 nor an overflow ends a training.
    assert found["f1"] == pytest.approx([2 / 3, math.nan], nan_ok=True)
    assert found["perplexity"] == pytest.approx([math.nan, math.inf], nan_ok=True)
    assert all(type(value) is float for value in found["f1"])


def test_ratio_of_vectors_is_an_array_of_quotients() -> None:
    class Worst(Experiment):
        def derive(self, values: Mapping[str, Any]) -> Mapping[str, float]:
            return {"worst": values["iou"].min()}

    quotients = {"iou": torch.tensor([0.25, 0.75], dtype=torch.float64)}
    assert derived(Worst(), {"loss": 1.0, "iou": 0.5}, quotients) == {"worst": 0.25}


def test_nothing_is_derived_unless_overridden() -> None:
    assert derived_columns(Experiment(), {"loss": [1.0]}, {}) == {}


@pytest.mark.parametrize(
    ("p", "says"),
    [(1.0, "'loss', which measure\\(\\) returns: use another"), (0.0, "must be a number, got 'x'")],
)
def test_wrong_results_are_refused(p: float, says: str) -> None:
    with pytest.raises(UserError, match=says):
        derived(Wrong(), {"loss": 1.0, "p": p}, {})

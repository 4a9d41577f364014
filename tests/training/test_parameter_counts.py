"""How many parameters a model has, as tags."""

from __future__ import annotations

import torch
from torch import nn

from rankzero.training.parameter_counts import tags


def test_parameters_are_counted_in_all_trainable_and_by_module() -> None:
    model = nn.Sequential(nn.Linear(100, 20), nn.ReLU(), nn.LazyLinear(2), nn.Linear(2, 1))
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    model[0].requires_grad_(False)
    assert tags(model) == {
        "rankzero.parameters": "2026",
        "rankzero.parameters.trainable": "6",
        "rankzero.parameters.by_module": "0: 2,020, 3: 3, (model): 3",
    }


def test_many_modules_are_counted_together() -> None:
    found = tags(nn.Sequential(*(nn.Linear(1, 1) for _ in range(60))))
    assert found["rankzero.parameters.by_module"].endswith("49: 2, (10 more): 20")

"""Optimizer states by name and by number."""

from __future__ import annotations

import torch
from torch import nn

from rankzero.training.strategies import parameter_names


def test_state_is_converted_between_names_and_numbers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    decayed, plain = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = parameter_names.order(model, optimizer)
    assert names == ["0.weight", "1.weight", "0.bias", "1.bias"]
    named = parameter_names.by_name(optimizer.state_dict(), names)
    assert named["param_groups"][1]["params"] == ["0.bias", "1.bias"] and set(
        named["state"]
    ) == set(names)
    assert parameter_names.by_number(named, names) == optimizer.state_dict()
    parts = [
        parameter_names.part_of(named, names[::2]),
        parameter_names.part_of(named, names[1::2]),
    ]
    assert parameter_names.joined(parts)["state"].keys() == named["state"].keys()
    # A model may define first what it calls last. Its stages have the order of the calls.
    assert parameter_names.by_number(parameter_names.joined(parts[::-1]), names) == (
        optimizer.state_dict()
    )

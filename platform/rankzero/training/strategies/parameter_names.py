"""Optimizer states by parameter name, as divided models have them, and by number, as plain ones do. Pure.

So a run that was trained under one strategy goes on under any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


def order(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in its order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def by_name(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state keyed by the parameters' names; as it is, where it is so already."""
    if _is_named(saved):
        return dict(saved)
    state = {names[number]: entry for number, entry in saved["state"].items()}
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in saved["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def by_number(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state keyed by the parameters' numbers; as it is, where it is so already."""
    if not _is_named(saved):
        return dict(saved)
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers[name]: entry for name, entry in saved["state"].items()}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in saved["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _is_named(saved: Mapping[str, Any]) -> bool:
    return any(isinstance(key, str) for group in saved["param_groups"] for key in group["params"])


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of one optimizer whose parameters were spread over several, by name."""
    state = {name: entry for part in parts for name, entry in part["state"].items()}
    groups = [
        {**every[0], "params": [name for group in every for name in group["params"]]}
        for every in zip(*(part["param_groups"] for part in parts), strict=True)
    ]
    return {"state": state, "param_groups": groups}


def part_of(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return what a state, by name, has of some parameters."""
    mine = set(names)
    groups = [
        {**group, "params": [name for name in group["params"] if name in mine]}
        for group in saved["param_groups"]
    ]
    return {
        "state": {name: saved["state"][name] for name in saved["state"] if name in mine},
        "param_groups": groups,
    }


def on_host(content: Any) -> Any:
    """Return the same with every tensor copied to the host."""
    return tree_map(
        lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value, content
    )

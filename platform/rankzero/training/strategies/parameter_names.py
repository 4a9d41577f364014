"""Optimizer states keyed by parameter name (divided models) or by number (plain models). Pure.

Converting between the two lets a run continue under another strategy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def order(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in its order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def by_name(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state keyed by the parameters' names."""
    return dict(saved) if _is_named(saved) else rekeyed(saved, dict(enumerate(names)))


def by_number(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state keyed by the parameters' numbers."""
    if not _is_named(saved):
        return dict(saved)
    found = rekeyed(saved, {name: number for number, name in enumerate(names)})
    # PyTorch loads states by their order. The stages of a pipeline may have another one.
    for group in found["param_groups"]:
        group["params"].sort()
    return found


def rekeyed(saved: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state with each parameter's key replaced by `keys[key]`."""
    groups = [
        {**group, "params": [keys[key] for key in group["params"]]}
        for group in saved["param_groups"]
    ]
    state = {keys[key]: entry for key, entry in saved["state"].items()}
    return {"state": state, "param_groups": groups}


def _is_named(saved: Mapping[str, Any]) -> bool:
    return any(isinstance(key, str) for group in saved["param_groups"] for key in group["params"])


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state from those of optimizers that each had some of the parameters, by name."""
    # All parts have the same groups with the same options, and different parameters.
    state = {name: entry for part in parts for name, entry in part["state"].items()}
    groups = [
        {**every[0], "params": [name for group in every for name in group["params"]]}
        for every in zip(*(part["param_groups"] for part in parts), strict=True)
    ]
    return {"state": state, "param_groups": groups}


def part_of(saved: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the part of a state, by name, that belongs to some parameters."""
    groups = [
        {**group, "params": [name for name in group["params"] if name in names]}
        for group in saved["param_groups"]
    ]
    state = {name: entry for name, entry in saved["state"].items() if name in names}
    return {"state": state, "param_groups": groups}

"""The optimizers PyTorch can run as one kernel, run so."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.optim import Optimizer


def fused(optimizer: Optimizer) -> Optimizer:
    """Return `optimizer` in its fused form, where PyTorch has one and the user left the choice open.

    Only PyTorch's own classes with `fused=None`, and only before their first step.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or optimizer.state:
        return optimizer
    if any(
        group.get("fused", False) is not None or group.get("foreach") or group.get("differentiable")
        for group in optimizer.param_groups
    ):
        return optimizer
    with contextlib.suppress(RuntimeError, ValueError, TypeError):  # this device or number format has no fused form
        return _rebuilt(optimizer)
    return optimizer


def _rebuilt(optimizer: Optimizer) -> Optimizer:
    constructor: Any = type(optimizer)
    groups = [{**group, "fused": True} for group in optimizer.param_groups]
    rebuilt: Optimizer = constructor(groups, lr=optimizer.defaults["lr"], fused=True)
    return rebuilt


def one_by_one(optimizer: Optimizer) -> Optimizer:
    """Return `optimizer` so that it takes one parameter after the other: its kernels for many refuse a mixture."""
    for group in optimizer.param_groups:
        group.update({name: False for name in ("foreach", "fused") if name in group})
    return optimizer
